"""The command `zeusd-kubernetes`: the agent of one node."""

from __future__ import annotations

import logging
import signal
import sys
import threading

import click

from zeus_common.options import SOCKET, option
from zeus_ipc import __version__

KUBELET = "/var/lib/kubelet/pod-resources/kubelet.sock"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@option(
    "--namespace namespaces",
    'Obey annotations in this namespace; repeatable; "*" for all.',
    multiple=True,
    required=True,
    metavar="NAME",
)
@option(
    "--node",
    "This node's name in Kubernetes.",
    required=True,
    envvar="NODE_NAME",
    metavar="NAME",
)
@option(
    "--accounting",
    "Charge the energy of GPUs to the pods that hold them. All pods of the node are charged; "
    'name every namespace with --namespace "*", so that pods that have ended are known.',
    bool,
)
@option("--socket", "zeusd's socket.", SOCKET, metavar="PATH")
@option("--pod-resources", "kubelet's socket for PodResources.", default=KUBELET, metavar="PATH")
@option(
    "--kubeconfig",
    "How to reach the API server from outside a pod.",
    click.Path(exists=True, dir_okay=False),
)
@click.version_option(__version__, prog_name="zeusd-kubernetes")
def main(
    namespaces: tuple[str, ...],
    node: str,
    accounting: bool,
    socket: str | None,
    pod_resources: str,
    kubeconfig: str | None,
) -> None:
    """Limit the power of the GPUs of pods that ask for it by annotation; charge energy to pods.

    Run it on each node, as an administrator of zeusd. A pod with the annotation
    zeusd.dev/power-limit: "200", or dynamo.nvidia.com/gpu-power-limit, gets GPUs that take at most
    200 W until it ends.
    """
    try:
        import grpc  # noqa: F401 - is it there?
        import kubernetes
    except ImportError as error:
        raise SystemExit(
            f'zeusd-kubernetes: {error.name} is not installed; pip install "zeusd[kubernetes]"'
        ) from None
    from zeus_ipc.client import Client
    from zeusctl.kubernetes.accounts import PodAccounts
    from zeusctl.kubernetes.agent import Agent, Events
    from zeusctl.kubernetes.kubelet import Kubelet
    from zeusctl.kubernetes.slices import Slices
    from zeusctl.kubernetes.watch import PodWatch

    logging.basicConfig(
        level=logging.INFO, format="zeusd-kubernetes: %(message)s", stream=sys.stderr
    )
    try:
        if kubeconfig is None:
            kubernetes.config.load_incluster_config()
        else:
            kubernetes.config.load_kube_config(kubeconfig)
    except kubernetes.config.ConfigException as error:
        raise SystemExit(
            f"zeusd-kubernetes: the API server cannot be found ({error}); run it in a pod with a "
            "service account, or name a --kubeconfig"
        ) from None
    changed, ended = threading.Event(), threading.Event()
    watches = [
        PodWatch(kubernetes.client.CoreV1Api(), node, namespace, changed.set)
        for namespace in namespaces
    ]

    def stop(*_: object) -> None:
        ended.set()
        changed.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    events = Events(kubernetes.client.CoreV1Api(), node)
    with Client(socket, heartbeat=False, timeout_s=10.0) as client:
        for watch in watches:
            watch.start()
        logging.info("node %s, namespaces %s", node, ", ".join(namespaces))
        kubelet = Kubelet(pod_resources)
        slices = Slices(kubernetes.client.CustomObjectsApi(), node)
        if accounting:
            accounts = PodAccounts(client, watches, kubelet, slices.uuid)
            threading.Thread(target=accounts.run, args=(ended,), name="accounts").start()
        Agent(client, watches, kubelet, events, changed, slices.uuid).run(ended)


if __name__ == "__main__":
    main()
