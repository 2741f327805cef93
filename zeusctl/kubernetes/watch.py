"""This node's pods, kept up to date by a watch on the Kubernetes API."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import urllib3
from kubernetes import client
from kubernetes.client.rest import ApiException
from kubernetes.watch import Watch

from zeusctl.kubernetes.pods import Pod, pod_of

READ_S = 90.0
"""A watch that receives nothing for this long is dead: bookmarks arrive every minute."""
CONNECT_S = 10.0
EVERY = "*"

log = logging.getLogger("zeusd_kubernetes")


class PodWatch:
    """The pods of this node in one namespace, on a thread of its own.

    Args:
        namespace: `*`: all.
        changed: Called after each change.
        pause_s: Pause before the retry after a failure, doubled each time.
    """

    def __init__(
        self,
        api: client.CoreV1Api,
        node: str,
        namespace: str,
        changed: Callable[[], None],
        pause_s: float = 1.0,
    ) -> None:
        self._namespace = namespace
        self._changed = changed
        self._first_pause_s = self._pause_s = pause_s
        self._options: dict[str, Any] = {"field_selector": f"spec.nodeName={node}"}
        self._list = api.list_pod_for_all_namespaces
        if namespace != EVERY:
            self._list = api.list_namespaced_pod
            self._options["namespace"] = namespace
        self._lock = threading.Lock()
        self._pods: dict[str, Pod] | None = None
        self._watch: Watch | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"pods {namespace}", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread soon; does not wait for it."""
        self._ended.set()
        watch = self._watch
        if watch is not None:
            watch.stop()

    def pods(self) -> list[Pod] | None:
        """The pods as last seen; None: the server has not answered yet.

        Raises:
            RuntimeError: The thread has ended by itself.
        """
        if self._thread.ident and not self._thread.is_alive() and not self._ended.is_set():
            raise RuntimeError(f"the watch on namespace {self._namespace} has ended")
        with self._lock:
            return None if self._pods is None else [*self._pods.values()]

    def _run(self) -> None:
        version: str | None = None
        while not self._ended.is_set():
            try:
                if version is None:
                    version = self._read()
                version = self._follow(version)
                self._pause_s = self._first_pause_s
            except ApiException as error:
                if error.status != HTTPStatus.GONE:
                    self._wait(self._refusal(error))
                version = None
            except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                # Keep the pods as last seen: an unreachable server must not end any limit.
                self._wait(f"the API server does not answer ({error})")
                version = None

    def _read(self) -> str:
        """Reads all pods; returns the version from which to watch."""
        answer = self._list(
            **self._options, _preload_content=False, _request_timeout=(CONNECT_S, READ_S)
        )
        if not 200 <= answer.status <= 299:  # some versions of the library raise it themselves
            raise ApiException(status=answer.status, reason=answer.reason)
        listing = json.loads(answer.data)
        pods = [pod_of(one) for one in listing["items"]]
        with self._lock:
            self._pods = {pod.uid: pod for pod in pods}
        self._changed()
        return str(listing["metadata"]["resourceVersion"])

    def _follow(self, version: str) -> str:
        """Follows changes from this version on until the server ends the watch; returns the last
        version.
        """
        watch = self._watch = Watch(return_type=object)
        # The server ends a watch after this time; the next one continues from there.
        for event in watch.stream(
            self._list,
            **self._options,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=300,
            _request_timeout=(CONNECT_S, READ_S),
        ):
            pod = event["raw_object"]
            version = pod["metadata"]["resourceVersion"]
            if event["type"] != "BOOKMARK":
                self._take(event["type"], pod_of(pod))
            self._pause_s = self._first_pause_s
        return version

    def _take(self, kind: str, pod: Pod) -> None:
        with self._lock:
            assert self._pods is not None
            if kind == "DELETED":
                self._pods.pop(pod.uid, None)
            else:
                self._pods[pod.uid] = pod
        self._changed()

    def _refusal(self, error: ApiException) -> str:
        if error.status in (401, 403):
            where = "all namespaces" if self._namespace == EVERY else self._namespace
            return (
                f"the API server does not let this service account watch pods in {where} "
                f"({error.status}); give it a Role with get, list and watch on pods"
            )
        return f"the API server refuses ({error.status} {error.reason})"

    def _wait(self, why: str) -> None:
        log.warning("%s; the next attempt is in %g s", why, self._pause_s)
        self._ended.wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, 30.0)
