"""Environment variables. No object in the code lists them; a test searches the sources for each."""

from __future__ import annotations

from zeus._node import STALL_TIMEOUT_ENV
from zeus._pushgateway import RANKS
from zeus.compat.functions import LEVEL_ENV
from zeus.monitor.carbon import TOKEN_ENV as CARBON_TOKEN_ENV
from zeus.monitor.price import KEY_ENV as PRICE_KEY_ENV
from zeus.optimizer.batch_size.client import RUN_ID_ENV
from zeus.optimizer.batch_size.http import TOKEN_ENV as BATCH_SIZE_TOKEN_ENV
from zeus.optimizer.pipeline_frequency.connection import TOKEN_ENV as PIPELINE_TOKEN_ENV
from zeus.run import settings as run
from zeus.serving.asgi import TENANT_ENV
from zeus.serving.metrics import URL_ENV
from zeus.serving.vllm.probe import MODE_ENV
from zeus.serving.wire import DEFAULT_SOCKET
from zeus.serving.wire import SOCKET_ENV as SERVING_SOCKET_ENV
from zeus_common.http_guard import HOSTS
from zeus_ipc.sockets import DEFAULT_SOCKET_PATH, SOCKET_ENV
from zeusctl.exporter.__main__ import DEFAULT_LISTEN
from zeusd.embed import STATE_DIR_ENV
from zeusd.identity import EMBEDDED_STATE_DIR
from zeusd.runtime.gpu_locks import LOCK_DIR, LOCK_DIR_ENV

from .markdown import code, heading, prose, table
from .sources import listed_attributes

_LEAD = """# Environment variables

Every variable that the programs and the library read. The servers' settings, which are variables
too, have [their own page](servers.md).
"""


def ours() -> dict[str, dict[str, tuple[str, str]]]:
    """By section and name: the default, and the meaning."""
    of_run = listed_attributes(run.Settings.__doc__ or "")
    defaults = {**run.Settings(target_metric=0.0).to_env(), "ZEUS_TARGET_METRIC": ""}
    return {
        "Reaching zeusd": {
            SOCKET_ENV: (
                DEFAULT_SOCKET_PATH,
                "Its socket, for every client. Set, or with a socket at the default place, the "
                "library never measures without zeusd.",
            ),
        },
        "Training": {
            STALL_TIMEOUT_ENV: (
                "",
                "Seconds without a training step or a window after which the process's "
                "leases end; unset: only a process that stops or hangs loses them.",
            ),
            STATE_DIR_ENV: (
                EMBEDDED_STATE_DIR,
                "Folder of the journal of a process that works without zeusd. Except for root, "
                "the default is `zeusd` in XDG_RUNTIME_DIR, else a folder in /tmp.",
            ),
            LOCK_DIR_ENV: (
                LOCK_DIR,
                "Folder of the locks by which one engine at a time changes a GPU, also zeusd's. "
                "All engines of a node must have the same one.",
            ),
        },
        "ZeusMaster and ZeusDataLoader": {
            name: (default, of_run[name.removeprefix("ZEUS_").lower()])
            for name, default in defaults.items()
        },
        "Optimizers with a server": {
            BATCH_SIZE_TOKEN_ENV: (
                "",
                "The token that the batch size server requires: for training, and for `bso` with "
                "`--server`.",
            ),
            "ZEUS_BSO_READ_TOKEN": ("", "For `bso` with `--server`: the token for reading."),
            RUN_ID_ENV: (
                "",
                "Names a training run, so that one that is preempted and restarted "
                "continues its trial.",
            ),
            PIPELINE_TOKEN_ENV: ("", "The token that the pipeline frequency server requires."),
        },
        "Serving": {
            MODE_ENV: (
                "",
                "In vLLM's environment: `steps` records the scheduler's steps, `stats` the "
                "front end's statistics; otherwise the plugin does nothing.",
            ),
            SERVING_SOCKET_ENV: (
                DEFAULT_SOCKET,
                "Socket to which an engine sends its steps, and from which "
                "`python -m zeus.serving serve` reads them.",
            ),
            URL_ENV: (
                "",
                "In vLLM's environment: address of the ledger, whose metrics are added "
                "to the engine's own.",
            ),
            TENANT_ENV: (
                "",
                "For the ASGI middleware: the header whose value is a request's tenant in reports.",
            ),
        },
        "HTTP servers": {
            HOSTS: (
                "",
                "Further names of a server, separated by commas; `*`: any. It answers by "
                "addresses, names without a dot, names of private networks and the machine's own.",
            ),
        },
        "Emissions and cost": {
            CARBON_TOKEN_ENV: ("", "Your key for Electricity Maps."),
            PRICE_KEY_ENV: ("", "Your key for OpenEI."),
        },
        "Programs for ml-energy/zeus": {
            LEVEL_ENV: (
                "INFO",
                "Level of the loggers that `zeus.utils.logging.get_logger` creates.",
            ),
        },
        "Commands": {
            "ZEUSD_EXPORTER_LISTEN": (DEFAULT_LISTEN, "Where `zeusd-exporter` listens."),
            "ZEUSD_EXPORTER_WORKLOADS": ("", "1: `zeusd-exporter` has energy by job and pod."),
            "ZEUSD_EXPORTER_OTEL": ("", "1: also energy by OpenTelemetry's names."),
            "ZEUS_FLEET_ETCD": (
                "localhost:2379",
                "Members of etcd for `zeus-fleet`, separated by spaces.",
            ),
            "ZEUS_FLEET_PREFIX": ("/zeus-fleet/", "Prefix of all its keys."),
            "ZEUS_FLEET_CACERT": ("", "etcd's CA: `zeus-fleet` uses TLS."),
            "ZEUS_FLEET_CERT": ("", "Client certificate of `zeus-fleet`."),
            "ZEUS_FLEET_KEY": ("", "Its private key."),
            "ZEUS_FLEET_LISTEN": ("127.0.0.1:9860", "Address on which `zeus-fleet serve` listens."),
            "ZEUS_FLEET_RECORD": ("", "File to which it appends a record each second."),
            "ZEUS_FLEET_NAME": ("host name", "Name of the node or allocator."),
            "ZEUS_FLEET_POLICY": ("water-filling", "Policy of `zeus-fleet allocate`."),
            "ZEUS_FLEET_LATENCY_SHARE": ("100", "Its `--latency-share`, %."),
            "NODE_NAME": ("", "For `zeusd-kubernetes`: this node's name in Kubernetes."),
            "ZEUSCTL_TIMEOUT": ("10", "Seconds for which `zeusctl` waits for each reply of zeusd."),
            "ZEUSCTL_TRACEBACK": ("", "If set, a bug in `zeusctl` shows its traceback."),
        },
    }


OTHERS = {
    "CUDA_VISIBLE_DEVICES": "The GPUs of a job, read as CUDA reads it.",
    "CUDA_DEVICE_ORDER": "The order in which CUDA counts them.",
    **dict.fromkeys(RANKS, "The rank of a process, if torch.distributed is not initialized."),
    "WORLD_SIZE": "Whether a process is one of several.",
    "NO_COLOR": "If set, output has no color.",
    "TERM": "`dumb`: output has no color.",
    "XDG_CACHE_HOME": "Folder of the last known best batch sizes; default: ~/.cache.",
    "XDG_RUNTIME_DIR": "See ZEUSD_STATE_DIR.",
    "NOTIFY_SOCKET": "Set by systemd: where zeusd and `zeus-fleet node` report readiness.",
    "LISTEN_FDS": "Set by systemd: the sockets that it passes.",
    "LISTEN_PID": "Set by systemd: the process that it passes them to.",
    "SLURM_SHARDS_ON_NODE": "Set by Slurm: the job's shards of GPUs, for `zeusctl allocate`.",
    "STATE_DIRECTORY": "Set by systemd: folder of the energy ledger; zeusd.toml may name another.",
    "WATCHDOG_USEC": "Set by systemd: the interval of the watchdog.",
    "WATCHDOG_PID": "systemd's: from whom.",
    "JOURNAL_STREAM": "Set by systemd: whether the log goes to its journal.",
    "KUBERNETES_SERVICE_HOST": "For `zeusctl doctor`: the kind of container.",
    "APPTAINER_NAME": "The same.",
    "SINGULARITY_NAME": "The same.",
}
"""Variables of others, and what they are read for."""


def page() -> str:
    """The page."""
    found = _LEAD
    for title, variables in ours().items():
        found += heading(2, title)
        rows = [
            (code(name), code(default) if default else "unset", prose(meaning))
            for name, (default, meaning) in variables.items()
        ]
        found += table(("variable", "default", "meaning"), rows)
    found += heading(2, "Of others")
    return found + table(
        ("variable", "read for"), [(code(name), prose(text)) for name, text in OTHERS.items()]
    )
