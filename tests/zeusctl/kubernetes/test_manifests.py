"""The manifests: their schemas, and the rules that they keep."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.late import late
from tests.preloaded import preloaded
from tests.support import IMPORTED
from zeusctl.kubernetes.__main__ import KUBELET, main
from zeusctl.kubernetes.pods import milliwatts

celpy = late("celpy")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "kubernetes"
ANNOTATION = "zeusd.dev/power-limit"
NEWEST = 37
"""Of the versions 1.x whose schemas kubernetes-validate 1.37 has."""


@functools.cache
def read(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def manifests(name: str) -> list[dict[str, Any]]:
    """The manifests of a file, to be changed."""
    return copy.deepcopy(read(name))


@pytest.mark.parametrize("minor", range(31, NEWEST + 1))
def test_every_manifest_is_valid_in_each_version(
    minor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strictly: unknown fields are mistakes. PodMonitor is not Kubernetes' own."""
    schemas = kubernetes_validate.utils
    # All definitions of a version, which it would read again for each manifest.
    read_once = functools.cache(schemas.schema_contents)
    monkeypatch.setattr(schemas, "schema_contents", read_once)
    seen = set()
    for path in EXAMPLES.glob("*.yaml"):
        for one in manifests(path.name):
            if one["kind"] != "PodMonitor":
                kubernetes_validate.validate(one, f"1.{minor}", strict=True)
                seen.add(one["kind"])
    assert {"DaemonSet", "RoleBinding", "ValidatingAdmissionPolicy", "Pod"} <= seen


def test_the_check_of_manifests_is_strict() -> None:
    (pod,) = manifests("training-pod.yaml")
    pod["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="volumeMount"):
        kubernetes_validate.validate(pod, "1.31", strict=True)


def test_the_daemonset_has_the_least_that_zeusd_needs() -> None:
    (daemonset,) = (one for one in manifests("daemonset.yaml") if one["kind"] == "DaemonSet")
    pod = daemonset["spec"]["template"]["spec"]
    containers = {one["name"]: one for one in pod["containers"]}
    zeusd, exporter = containers["zeusd"], containers["exporter"]
    assert pod["hostPID"] is True, "zeusd must see the processes of its clients"
    assert "hostNetwork" not in pod
    assert pod["automountServiceAccountToken"] is False
    rights = zeusd["securityContext"]
    assert "privileged" not in rights
    assert rights["capabilities"] == {"drop": ["ALL"], "add": ["SYS_ADMIN"]}
    assert exporter["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert exporter["securityContext"]["runAsNonRoot"] is True
    assert all(one["securityContext"]["readOnlyRootFilesystem"] for one in containers.values())
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes["run"]["hostPath"] == {"path": "/run/zeusd", "type": "DirectoryOrCreate"}
    assert volumes["control-groups"]["hostPath"]["path"] == "/sys/fs/cgroup"
    mounts = {one["name"]: one for one in zeusd["volumeMounts"]}
    assert mounts["control-groups"] == {
        "name": "control-groups",
        "readOnly": True,
        "mountPath": "/sys/fs/cgroup",  # where zeusd looks for pods that have ended
    }
    host = [one["name"] for one in pod["volumes"] if "hostPath" in one]
    assert host == ["run", "control-groups"]


def test_the_daemonsets_configuration_is_one_that_zeusd_takes(tmp_path: Path) -> None:
    (config,) = (one for one in manifests("daemonset.yaml") if one["kind"] == "ConfigMap")
    path = tmp_path / "zeusd.toml"
    path.write_text(config["data"]["zeusd.toml"])
    checked = preloaded(*IMPORTED).run("-m", "zeusd", "check-config", str(path))
    assert (checked.returncode, checked.stderr) == (0, "")


def test_a_training_pod_has_the_folder_and_no_rights() -> None:
    (pod,) = manifests("training-pod.yaml")
    (container,) = pod["spec"]["containers"]
    (volume,) = pod["spec"]["volumes"]
    assert volume["hostPath"] == {"path": "/run/zeusd", "type": "Directory"}
    assert container["volumeMounts"][0]["mountPath"] == "/run/zeusd"
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_prometheus_finds_the_exporter_by_annotation_or_by_pod_monitor() -> None:
    (daemonset,) = (one for one in manifests("daemonset.yaml") if one["kind"] == "DaemonSet")
    template = daemonset["spec"]["template"]
    (exporter,) = (one for one in template["spec"]["containers"] if one["name"] == "exporter")
    (port,) = exporter["ports"]
    annotations = template["metadata"]["annotations"]
    assert annotations["prometheus.io/scrape"] == "true"
    assert annotations["prometheus.io/port"] == str(port["containerPort"])
    (monitor,) = manifests("podmonitor.yaml")
    assert monitor["metadata"]["namespace"] == daemonset["metadata"]["namespace"]
    assert monitor["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == (port["name"], annotations["prometheus.io/path"])


# ------------------------------------------------------------------------- limits that pods ask for


def test_the_agent_may_do_what_it_does_and_no_more() -> None:
    every = manifests("power-limits.yaml")
    found = {one["kind"]: one for one in every}
    rules = {
        one["metadata"]["name"]: {tuple(rule["resources"]): rule["verbs"] for rule in one["rules"]}
        for one in every
        if one["kind"] == "ClusterRole"
    }
    assert rules == {
        "zeusd-kubernetes": {
            ("pods",): ["get", "list", "watch"],
            ("pods/status",): ["patch"],
            ("events",): ["create"],
        },
        "zeusd-kubernetes-claims": {("resourceslices",): ["list"]},
    }
    bound = {(one["kind"], one["roleRef"]["name"]) for one in every if "roleRef" in one}
    assert bound == {
        ("RoleBinding", "zeusd-kubernetes"),
        ("ClusterRoleBinding", "zeusd-kubernetes-claims"),
    }
    pod = found["DaemonSet"]["spec"]["template"]["spec"]
    (agent,) = pod["containers"]
    assert pod["hostPID"] is True, "root is an administrator of zeusd only among its processes"
    assert pod["serviceAccountName"] == found["ServiceAccount"]["metadata"]["name"]
    assert agent["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert agent["securityContext"]["allowPrivilegeEscalation"] is False
    assert all(one["readOnly"] for one in agent["volumeMounts"])
    paths = [one["hostPath"]["path"] for one in pod["volumes"]]
    assert paths == ["/run/zeusd", str(Path(KUBELET).parent)]


def test_the_agents_arguments_are_ones_that_it_takes_and_its_role_is_for_these_namespaces() -> None:
    found = manifests("power-limits.yaml")
    (daemonset,) = (one for one in found if one["kind"] == "DaemonSet")
    (agent,) = daemonset["spec"]["template"]["spec"]["containers"]
    (name,) = (one["name"] for one in agent["env"])
    context = main.make_context("zeusd-kubernetes", [*agent["args"], "--node", "here"])
    (option,) = (one for one in main.params if one.name == "node")
    assert option.envvar == name
    bound = {one["metadata"]["namespace"] for one in found if one["kind"] == "RoleBinding"}
    assert set(context.params["namespaces"]) == bound


def denied(
    asked: str | None,
    namespace: str = "research",
    before: str | None = None,
    *,
    update: bool = False,
) -> list[str]:
    """Messages of the policy's validations that are false, as an API server evaluates them."""

    def pod(value: str | None) -> dict[str, Any]:
        return {"metadata": {"annotations": {ANNOTATION: value}} if value is not None else {}}

    def value_of(expression: str) -> Any:
        program = celpy.Environment()
        parsed = program.compile(re.sub(r"variables\.(\w+)", r"\1", expression))
        return program.program(parsed, functions={"substring": substring}).evaluate(facts)

    spec = manifests("power-limits-policy.yaml")[0]["spec"]
    request = {"namespace": namespace, "operation": "UPDATE" if update else "CREATE"}
    facts = {"object": pod(asked), "oldObject": pod(before) if update else None, "request": request}
    facts = {name: celpy.json_to_cel(value) for name, value in facts.items()}
    for one in spec["variables"]:
        facts[one["name"]] = value_of(one["expression"])
    return [one["message"] for one in spec["validations"] if not value_of(one["expression"])]


def substring(text: Any, begin: Any, end: Any) -> Any:
    """Of Kubernetes' extensions to CEL, the one that the policy uses."""
    return celpy.celtypes.StringType(str(text)[int(begin) : int(end)])


@pytest.mark.parametrize("asked", [None, "100", "200", "200W", "700"])
def test_the_policy_admits_what_the_agent_takes(asked: str | None) -> None:
    assert denied(asked) == []
    assert asked is None or milliwatts(ANNOTATION, asked)


@pytest.mark.parametrize("asked", ["99", "701", "1000", "much", "200 W", "200mW", "-200", "200.5"])
def test_the_policy_denies_other_values(asked: str) -> None:
    (said,) = denied(asked)
    assert "write watts from 100 to 700" in said


def test_the_policy_denies_other_namespaces_and_changes() -> None:
    (said,) = denied("200", "elsewhere")
    assert "no effect in this namespace" in said
    for after in ("150", "900", None):
        (said,) = denied(after, before="200", update=True)
        assert "cannot be changed" in said


def test_the_policy_leaves_alone_what_was_admitted_before_it_changed() -> None:
    assert denied("900", "elsewhere", before="900", update=True) == []
    assert denied(None, "elsewhere", update=True) == []
