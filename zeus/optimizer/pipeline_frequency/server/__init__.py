"""The server of the pipeline frequency optimizer: one for a training cluster, without GPU or root.

`router` is the HTTP side, `job_manager` has all jobs, `job` is one of them, `stragglers` detects
slow pipelines, `scheduler` has the schedulers, `planning` calls the planner, `storage` keeps the
state over a restart.
"""
