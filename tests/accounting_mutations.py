"""The promises of the energy ledger, row by row, and mutations that a test must notice.

That it costs little and delays no set or restore is a matter of time:
`benchmarks/accounting.py` measures it.
"""

from __future__ import annotations

from tests.mutation import Mutation, always, drop, instead, never, sets, unreached

CONSERVATION = (
    Mutation(
        "the rest of a division of energy",
        "zeusd.energy.split.shares",
        drop("parts", "place"),
        "zeusd/energy/test_split.py::test_the_rest_goes_to_the_largest_remainders",
    ),
    Mutation(
        "energy is divided in whole numbers",
        "zeusd.energy.split.shares",
        sets("parts", "[round(total * weight / whole) for weight in weights]"),
        "zeusd/energy/test_split.py::test_the_rest_goes_to_the_largest_remainders",
    ),
    Mutation(
        "idle energy is not active as well",
        "zeusd.energy.split._nobody",
        sets("active_uj", "energy_uj"),
        "zeusd/ledger/test_accounts.py::test_a_job_is_charged_for_what_it_held_and_nobody_for_the_rest",
    ),
    Mutation(
        "what is known by process is not added to the rest",
        "zeusd.ledger.usage.Reader",
        drop("left", "amounts"),
        "zeusd/ledger/test_by_process.py::test_each_process_has_its_part_and_an_allocation_is_its_holders",
    ),
    Mutation(
        "CPU time is counted in one hierarchy",
        "zeusd.runtime.cpu_use.CpuUse",
        instead("hierarchy", "self._root"),
        "zeusd/runtime/test_cpu_use.py::test_version_1_counts_in_one_hierarchy",
    ),
)
"""Any schedule of holders, processes, MIG changes and resets: the sum is the counters', to the
microjoule."""

BOUNDS = (
    Mutation(
        "bounds hold the truth",
        "zeusd.energy.split",
        always("account", "parts"),
        "zeusd/ledger/test_shared.py::test_notebooks_are_charged_within_bounds_that_hold_the_truth",
    ),
    Mutation(
        "bounds of activity are not certain, whatever else is in a sum",
        "zeus_ipc.charging.bounds_of",
        instead("max", "min(kinds, key=_ORDER.index, default=Bounds.EXACT)"),
        "zeusd/energy/test_split.py::test_every_method_says_what_its_bounds_are",
    ),
    Mutation(
        "parts that nobody holds are idle, and nobody else's",
        "zeusd.energy.split.split",
        instead("_with_rest", "_merged(situation.holders)"),
        "zeusd/ledger/test_shared.py::test_a_part_beside_one_that_nobody_holds_is_not_charged_the_whole_gpu",
    ),
)
"""They hold the truth and the estimate, and say what they follow from."""

KILLS = (
    Mutation(
        "rows and the position of the meter are one transaction",
        "zeusd.ledger.store.LedgerStore.settle",
        instead("_transaction", "contextlib.nullcontext()"),
        "zeusd/ledger/test_accounts.py::test_a_settlement_that_fails_between_rows_and_position_leaves_neither",
    ),
    Mutation(
        "a restart goes on where the ledger ends",
        "zeusd.runtime.accounts.Accounts.recover",
        drop("_positions"),
        "zeusd/ledger/test_accounts.py::test_a_restart_loses_nothing_that_someone_held",
    ),
    Mutation(
        "a settlement that failed is made again",
        "zeusd.runtime.accounts.Accounts.settle",
        drop("_accountants", "position"),
        "zeusd/ledger/test_accounts.py::test_a_settlement_that_could_not_be_written_is_made_again",
    ),
)
"""zeusd killed at any instant: nothing twice, and nothing lost that the history has."""

REBOOTS = (
    Mutation(
        "a position is of its boot",
        "zeusd.ledger.store.LedgerStore.positions",
        instead(
            "execute",
            'self._db.execute("SELECT uuid, t_ns, energy_uj FROM position JOIN gpu ON id = gpu")',
        ),
        "zeusd/ledger/test_accounts.py::test_a_reboot_ends_what_was_held_and_never_charges_more_than_was_counted",
    ),
    Mutation(
        "what is held ends with its boot",
        "zeusd.runtime.allocations.Allocations.recover",
        drop("end_earlier_boots"),
        "zeusd/ledger/test_accounts.py::test_a_reboot_ends_what_was_held_and_never_charges_more_than_was_counted",
    ),
    Mutation(
        "what was drawn is settled each minute",
        "zeusd.runtime.accounts.Accounts.work",
        never("SETTLE_NS"),
        "zeusd/ledger/test_gaps.py::test_a_reboot_costs_the_last_minute_at_most",
    ),
    Mutation(
        "a power failure cuts between settlements",
        "zeusd.ledger.store.LedgerStore.settle",
        instead("_transaction", "contextlib.nullcontext()"),
        "zeusd/ledger/test_damage.py::test_a_power_failure_at_any_byte_of_the_log_leaves_a_ledger_that_agrees",
    ),
)
"""Reboots and power failures: the last minute less at most, and never more."""

PIDS = (
    Mutation(
        "a process that has ended is another than one with its pid",
        "zeusd.runtime.presence.Presence",
        always("ended_ns"),
        "zeusd/runtime/test_presence.py::test_a_pid_that_another_process_got_is_another_process",
    ),
    Mutation(
        "a process begins after the one that had its pid",
        "zeusd.runtime.presence.Presence.listed",
        instead("ended", "0"),
        "zeusd/runtime/test_presence.py::test_a_process_begins_after_the_one_that_had_its_pid",
    ),
    Mutation(
        "a process is its pid and its start",
        "zeusd.runtime.presence.Presence",
        instead("ChargedProcess", "ChargedProcess(pid, 0)"),
        "zeusd/ledger/test_by_process.py::test_a_pid_that_another_process_has_got_is_another_process",
    ),
)
"""Pids that the kernel gives again: no microjoule to another process."""

FORGERIES = (
    Mutation(
        "a job's name counts only where root owns the group",
        "zeusd.runtime.control_groups.ControlGroups",
        never("st_uid"),
        "zeusd/runtime/test_control_groups.py",
    ),
)
"""A control group that a user made names no job and no pod."""

CLOCKS = (
    Mutation(
        "a step of the clock moves later rows",
        "zeusd.runtime.accounts.Accounts.settle",
        drop("_offset_ns", "offset_ns"),
        "zeusd/ledger/test_accounts.py::test_steps_of_the_clock_move_later_rows_and_no_sum",
    ),
    Mutation(
        "a suspend is nobody's",
        "zeusd.runtime.accounts.Accounts",
        drop("EXCLUDED"),
        "zeusd/ledger/test_accounts.py::test_energy_drawn_during_a_suspend_is_unattributed",
    ),
    Mutation(
        "days are local days",
        "zeusctl.usage.edges",
        instead("_local", "day.replace(tzinfo=timezone.utc)"),
        "zeusd/ledger/test_accounts.py::test_a_day_on_which_clocks_change_has_its_hours",
    ),
    Mutation(
        "a meter never falls",
        "zeusd.energy.accountant.Accountant.settle",
        instead("min", "energy_uj(t_ns)"),
        "zeusd/energy/test_accountant.py::test_a_meter_that_is_reinterpolated_charges_nothing_negative",
    ),
)
"""Steps of the clock, suspends, days of 23 and 25 hours, any zone: days add up, and no row is
negative."""

GAPS = (
    Mutation(
        "what was not sampled has a name",
        "zeusd.runtime.readings.observed",
        unreached("reason", "DOWN", "NOT_SAMPLED"),
        "zeusd/ledger/test_gaps.py::test_a_gpu_that_is_lost_has_its_own_gap_and_the_others_none",
    ),
    Mutation(
        "a lost GPU stops no settlement",
        "zeusd.runtime.accounts.Accounts._settlements",
        never("source"),
        "zeusd/ledger/test_gaps.py::test_a_gpu_that_is_lost_has_its_own_gap_and_the_others_none",
    ),
    Mutation(
        "a history that starts again is charged from its own beginning",
        "zeusd.runtime.accounts.Accounts",
        always("begins_ns", "t_ns"),
        "zeusd/ledger/test_accounts.py::test_a_driver_that_is_loaded_again_begins_a_new_history_without_a_step",
    ),
    Mutation(
        "all MIG devices are measured or none",
        "zeusd.runtime.activity.ActivityReader",
        sets("measured", "bool(used)"),
        "zeusd/runtime/test_activity.py::test_an_instance_that_is_new_makes_the_interval_unmeasured",
    ),
    Mutation(
        "sizes of MIG devices are no measured use",
        "zeusd.runtime.presence.Presence",
        always("measured"),
        "zeusd/ledger/test_gaps.py::test_mig_devices_that_change_leave_the_one_that_runs_as_it_was",
    ),
)
"""MIG devices that change while one runs, a lost GPU, a driver that is loaded again: the gap has a
name, and the others are exact."""

SLURM = (
    Mutation(
        "what is drawn idle is a figure of its own",
        "zeusd.energy.split._whole",
        never("idle"),
        "zeusd/ledger/test_accounts.py::test_a_job_that_holds_and_does_not_compute_is_charged_as_held_idle",
    ),
    Mutation(
        "shards have weights",
        "zeusd.runtime.allocations.Allocations",
        instead("max", "1"),
        "zeusd/ledger/test_accounts.py::test_shards_share_by_weight_and_a_whole_allocation_ends_them",
    ),
    Mutation(
        "a run of a job ends the one before it",
        "zeusd.runtime.allocations.Allocations.begin",
        never("_is_earlier_run"),
        "zeusd/ledger/test_accounts.py::test_a_run_that_begins_ends_an_earlier_one_on_other_gpus",
    ),
    Mutation(
        "an allocation ends with its job's control group",
        "zeusd.runtime.allocations.Allocations.present",
        never("GONE_NS"),
        "zeusd/ledger/test_accounts.py::test_a_lost_epilog_ends_with_the_jobs_control_group",
    ),
    Mutation(
        "a group whose processes are gone is gone",
        "zeusd.runtime.control_groups",
        instead("splitlines", "()"),
        "zeusd/ledger/test_accounts.py::test_a_suspended_job_keeps_its_gpu_and_is_charged_what_that_draws_idle",
    ),
    Mutation(
        "a step is charged what the run of its SLUID is",
        "zeusd.ledger.usage.Reader",
        never("is_run"),
        "zeusd/ledger/test_accounts.py::test_a_run_is_found_by_its_sluid",
    ),
    Mutation(
        "the nodes of a job are one sum",
        "zeusctl.day_files.usage_of",
        sets("key", "(interval, *label, row.node)"),
        "zeusctl/test_energy_bounds.py::test_a_job_of_two_nodes_is_one_sum_however_often_their_files_came",
    ),
    Mutation(
        "a file that came too early replaces none",
        "zeusctl.day_files.read",
        always("metered_uj"),
        "zeusctl/test_energy_bounds.py::test_a_job_of_two_nodes_is_one_sum_however_often_their_files_came",
    ),
    Mutation(
        "without Contain the doctor complains",
        "zeusctl.machine_checks.accounting_checks",
        never("flags"),
        "zeusctl/test_accounting_checks.py::test_each_problem_is_named",
    ),
)
"""Held idle, shards, two runs of a job, lost epilogs, suspended jobs, the figure that sacct shows,
jobs of two nodes, and what the doctor says without `PrologFlags=Contain`. On a real slurmctld and
slurmd: `tests/system/test_slurm.py`."""

KUBERNETES = (
    Mutation(
        "a pod that has ended holds nothing",
        "zeusctl.kubernetes.accounts.holdings",
        never("ended"),
        "zeusctl/kubernetes/test_accounts.py::test_pods_hold_what_kubelet_lists",
    ),
    Mutation(
        "a replica is a share",
        "zeusctl.parts.Devices.find",
        never("share"),
        "zeusctl/kubernetes/test_accounts.py::test_pods_hold_what_kubelet_lists",
    ),
    Mutation(
        "a MIG device is a slice of its GPU",
        "zeusctl.parts.Devices",
        never("instance"),
        "zeusctl/kubernetes/test_accounts.py::test_pods_hold_what_kubelet_lists",
    ),
    Mutation(
        "a claim names its device",
        "zeusctl.kubernetes.kubelet",
        never("uuids"),
        "zeusctl/kubernetes/test_claims.py::test_a_claims_device_is_its_uuid_where_its_cdi_name_has_one",
    ),
    Mutation(
        "a kubelet that restarts ends no holding",
        "zeusctl.kubernetes.accounts",
        sets("running", "set()"),
        "zeusctl/kubernetes/test_accounts.py::test_a_kubelet_that_restarts_ends_no_holding_of_a_pod_that_runs",
    ),
    Mutation(
        "a static pod is found by its control group",
        "zeusctl.kubernetes.accounts.holdings",
        sets("group", "'' if pod is None else pod.uid"),
        "zeusctl/kubernetes/test_accounts.py::test_a_static_pod_is_found_by_the_name_that_its_control_group_has",
    ),
)
"""Pods that have ended, replicas, MIG, resource claims, a kubelet that restarts, static pods."""

RIGHTS = (
    Mutation(
        "a sum of one other user is that user's figure",
        "zeusd.ledger.usage.Reader.usage",
        never("reader", "charged"),
        "zeusd/ledger/test_accounts.py::test_a_user_sees_the_users_own_rows_and_the_others_as_one_sum",
    ),
    Mutation(
        "processes of others are one sum",
        "zeusd.ledger.usage.Reader",
        never("reader", "owner"),
        "zeusd/ledger/test_by_process.py::test_users_see_their_own_processes_and_the_others_as_one",
    ),
    Mutation(
        "metrics name no other user",
        "zeusd.core.accounting",
        always("kind", "_NOBODYS"),
        "zeusd/core/test_accounting.py::test_metrics_name_other_users_only_to_permitted_users",
    ),
    Mutation(
        "the ledger is zeusd's alone",
        "zeusd.ledger.schema.open_ledger",
        instead("mkdir", "path.parent.mkdir(parents=True, exist_ok=True)"),
        "zeusd/ledger/test_damage.py::test_nobody_but_zeusd_may_open_the_ledger",
    ),
)
"""A user sees nothing of another's, by any option, file, metric or error."""

PROMETHEUS = (
    Mutation(
        "a user's counter begins at 0",
        "zeusd.runtime.accounts.Accounts.totals",
        drop("setdefault", "parent_of"),
        "zeusd/ledger/test_accounts.py::test_jobs_of_half_a_minute_are_all_in_counters_scraped_once_a_minute",
    ),
    Mutation(
        "a job's counter begins at 0",
        "zeusd.runtime.workloads.Workloads.holding",
        drop("_begin"),
        "zeusd/ledger/test_accounts.py::test_a_jobs_counter_continues_over_restarts_and_ends_some_minutes_after_it",
    ),
    Mutation(
        "a job's counter goes on over a restart",
        "zeusd.runtime.workloads.Workloads",
        instead("_stored", "{}"),
        "zeusd/ledger/test_accounts.py::test_a_jobs_counter_continues_over_restarts_and_ends_some_minutes_after_it",
    ),
    Mutation(
        "idle energy is no account's",
        "zeusctl.exporter.accounting",
        sets("charged", "ledger.totals"),
        "zeusctl/test_accounting_metrics.py::test_accounts_idle_and_unattributed_energy_add_up_to_the_counters",
    ),
    Mutation(
        "accounts have a bound on their number",
        "zeusctl.exporter.accounting",
        never("MAX_ACCOUNTS"),
        "zeusctl/test_accounting_metrics.py::test_accounts_idle_and_unattributed_energy_add_up_to_the_counters",
    ),
)
"""Counters that begin at 0, go on over restarts, and add up to the GPUs'. By a real Prometheus:
`tests/zeusctl/test_exporter.py`."""

ALL = (
    *CONSERVATION,
    *BOUNDS,
    *KILLS,
    *REBOOTS,
    *PIDS,
    *FORGERIES,
    *CLOCKS,
    *GAPS,
    *SLURM,
    *KUBERNETES,
    *RIGHTS,
    *PROMETHEUS,
)
