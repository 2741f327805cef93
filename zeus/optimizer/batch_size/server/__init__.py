"""The batch size server: one for all jobs of a cluster, without GPU or root.

`router` is the HTTP interface, `settings` the configuration, `views` the representation of jobs,
`metrics` the Prometheus metrics. `zeus.optimizer.batch_size.store` holds jobs and trials.
"""
