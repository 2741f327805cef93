"""The batch size server: one for all jobs of a cluster, without GPU or root.

`router` is the HTTP side, `settings` how it is set up, `views` what people see of jobs, `metrics`
what Prometheus does. Jobs and trials are `zeus.optimizer.batch_size.store`'s.
"""
