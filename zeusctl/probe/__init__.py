"""A read-only probe of a node's GPUs: what their sensors and their driver's calls really do.

It needs the vendor's binding and nothing else, and never sets anything. The modules of analysis
(`series`, `period`, `visible`, `counter`, `latency`, `doubts`) are pure.
"""
