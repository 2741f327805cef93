"""A read-only probe of a node's GPUs: how their sensors and driver calls really behave. It needs
only the vendor's binding, and never sets anything. The modules of analysis (`series`, `period`,
`visible`, `counter`, `latency`, `doubts`) are pure.
"""
