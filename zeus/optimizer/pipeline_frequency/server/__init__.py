"""The server of the pipeline frequency optimizer: one for a training cluster, without GPU or root.

`router` is the HTTP side, `job_manager` knows all jobs, `job` one of them, `stragglers` which
pipeline is late, `scheduler` what schedules come from, `planning` calls the planner, `storage`
keeps it all over a restart.
"""
