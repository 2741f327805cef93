"""A stand-in for the Kubernetes API server: lists and watches pods, takes events and conditions.

It speaks the watch protocol as the API's documentation describes it: a list has a resourceVersion,
a watch from there sends each later change as a line of JSON in a chunked answer, bookmarks on
request, and an ERROR event with code 410 if the changes since then are no longer known.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]


class ApiServer:
    """The server, at `url`, until `close`.

    Attributes:
        events: What was written about pods.
        requests: Paths and queries of all requests that read.
        patches: How many conditions were sent.
        slices: ResourceSlices, of the version `slices_version`.
        forbidden: Namespaces whose pods the client may not read; "" for all of them at once.
    """

    def __init__(self) -> None:
        self.events: list[Object] = []
        self.requests: list[str] = []
        self.patches = 0
        self.slices: list[Object] = []
        self.slices_version = "v1"
        self.forbidden: set[str] = set()
        self._pods: dict[str, Object] = {}
        self._version = 100
        self._history: list[tuple[int, str, Object]] = []
        self._oldest = 100
        self._cut = 0
        self._moved = threading.Condition()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.answer(self)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.events.append(json.loads(body))
                _send(self, 201, server.events[-1])

            def do_PATCH(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.patches += 1
                server.patch(self, json.loads(body))

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    # --------------------------------------------------------------------------- what a test does

    def lose(self, pod: Object) -> None:
        """Deletes a pod in a part of the history that nobody can read any more."""
        with self._moved:  # a patch that is being made would bring it back
            del self._pods[pod["metadata"]["uid"]]
            self.compact()

    def apply(self, pod: Object) -> None:
        """Creates or changes a pod."""
        with self._moved:
            known = pod["metadata"]["uid"] in self._pods
            if known:  # a status is the API's: an update of a pod does not change it
                seen = self._pods[pod["metadata"]["uid"]]["status"].get("conditions", [])
                pod = {**pod, "status": {**pod["status"], "conditions": seen}}
            self._change("MODIFIED" if known else "ADDED", pod)

    def delete(self, pod: Object) -> None:
        """Deletes a pod."""
        with self._moved:
            self._change("DELETED", pod)

    def compact(self) -> None:
        """Forgets all changes so far and ends the watches; a client that returns is too late."""
        with self._moved:
            self._version += 1
            self._oldest = self._version
            self._history.clear()
            self._cut += 1
            self._moved.notify_all()

    def watchers(self, namespace: str = "") -> int:
        """How many watches have begun so far."""
        part = f"/namespaces/{namespace}/pods?" if namespace else "/pods?"
        return sum(part in one and "watch=" in one for one in self.requests)

    def close(self) -> None:
        """Ends it, and its watches."""
        with self._moved:
            self._cut += 1
            self._moved.notify_all()
        self._http.shutdown()
        self._http.server_close()

    # ------------------------------------------------------------------------------------ protocol

    def _change(self, kind: str, pod: Object) -> None:
        self._version += 1
        pod = json.loads(json.dumps(pod))
        pod["metadata"]["resourceVersion"] = str(self._version)
        self._history.append((self._version, kind, pod))
        self._pods[pod["metadata"]["uid"]] = pod
        if kind == "DELETED":
            del self._pods[pod["metadata"]["uid"]]
        self._moved.notify_all()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests.append(handler.path)
        parts = urlsplit(handler.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        path = parts.path.strip("/").split("/")
        namespace = path[3] if path[:3] == ["api", "v1", "namespaces"] else ""
        if path[:2] == ["apis", "resource.k8s.io"] and path[2:] == [
            self.slices_version,
            "resourceslices",
        ]:
            items = [
                one
                for one in self.slices
                if query["fieldSelector"] == f"spec.nodeName={one['spec']['nodeName']}"
            ]
            if "" in self.forbidden:
                _send(handler, 403, _status(403, "Forbidden"))
            else:
                _send(handler, 200, {"kind": "ResourceSliceList", "items": items, "metadata": {}})
        elif path[-1] != "pods":
            _send(handler, 404, _status(404, "NotFound"))
        elif namespace in self.forbidden:
            _send(handler, 403, _status(403, "Forbidden"))
        elif query.get("watch", "").lower() == "true":
            self._watch(handler, namespace, query)
        else:
            with self._moved:
                items = [one for one in self._pods.values() if _matches(one, namespace, query)]
                found = {
                    "kind": "PodList",
                    "apiVersion": "v1",
                    "items": items,
                    "metadata": {"resourceVersion": str(self._version)},
                }
            _send(handler, 200, found)

    def patch(self, handler: BaseHTTPRequestHandler, body: Object) -> None:
        """A strategic merge of a pod's status: conditions are a map by their type."""
        namespace, _, name, status = handler.path.partition("?")[0].split("/")[4:]
        assert status == "status"
        assert handler.headers["Content-Type"] == "application/strategic-merge-patch+json"
        if namespace in self.forbidden:
            _send(handler, 403, _status(403, "Forbidden"))
            return
        with self._moved:
            pod = self._pods.get(body["metadata"]["uid"])
            if pod is None or pod["metadata"]["name"] != name:
                _send(handler, 409, _status(409, "Conflict"))
                return
            pod = json.loads(json.dumps(pod))
            now = {one["type"]: one for one in pod["status"].get("conditions", ())}
            now |= {one["type"]: one for one in body["status"]["conditions"]}
            pod["status"]["conditions"] = [*now.values()]
            self._change("MODIFIED", pod)
        _send(handler, 200, pod)

    def condition(self, pod: Object) -> Object:
        """zeusd's condition of a pod; empty: none."""
        with self._moved:
            found = self._pods[pod["metadata"]["uid"]]["status"].get("conditions", ())
        return next((one for one in found if one["type"] == "zeusd.dev/PowerLimit"), {})

    def _watch(
        self, handler: BaseHTTPRequestHandler, namespace: str, query: dict[str, str]
    ) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for kind, found in self._since(int(query["resourceVersion"]), namespace, query):
            line = json.dumps({"type": kind, "object": found}).encode() + b"\n"
            handler.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
            handler.wfile.flush()
        handler.wfile.write(b"0\r\n\r\n")

    def _since(
        self, version: int, namespace: str, query: dict[str, str]
    ) -> Iterator[tuple[str, Object]]:
        began = self._cut
        if version < self._oldest:
            yield "ERROR", _status(410, "Expired")
            return
        while True:
            with self._moved:
                self._moved.wait_for(lambda: self._cut > began or self._version > version)
                if self._cut > began:
                    return
                news = [one for one in self._history if one[0] > version]
                version = self._version
            for _, kind, pod in news:
                if _matches(pod, namespace, query):
                    yield kind, pod
            if query.get("allowWatchBookmarks", "").lower() == "true":
                yield (
                    "BOOKMARK",
                    {
                        "kind": "Pod",
                        "apiVersion": "v1",
                        "metadata": {"resourceVersion": str(version)},
                    },
                )


def _matches(pod: Object, namespace: str, query: dict[str, str]) -> bool:
    node = query.get("fieldSelector", "").removeprefix("spec.nodeName=")
    return pod["metadata"]["namespace"] == (namespace or pod["metadata"]["namespace"]) and node in (
        "",
        pod["spec"].get("nodeName"),
    )


def _status(code: int, reason: str) -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": reason,
    }


def _send(handler: BaseHTTPRequestHandler, code: int, found: Object) -> None:
    body = json.dumps(found).encode()
    handler.send_response(code)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
