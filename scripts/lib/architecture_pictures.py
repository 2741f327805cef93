"""Draws docs/pictures/architecture*.svg: python scripts/lib/architecture_pictures.py

The pictures are narrow, so that they can be read on a phone, and have a light background of their
own, so that they can be read on a dark page.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

WIDTH = 480
INK, PALE, LINE = "#1d2733", "#5b6673", "#8a94a0"
PAPER, USER, SERVER, ROOT, DEVICE = "#fbfaf6", "#dcebfa", "#e2f2df", "#fbe6cf", "#e9e4f2"
PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


class Picture:
    """An SVG picture of boxes, arrows and text.

    Args:
        height: Of the picture.
        title: Text alternative.
    """

    def __init__(self, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" role="img" '
            'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif" font-size="14">',
            f"<title>{escape(title)}</title>",
            f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{INK}"/>'
            "</marker></defs>",
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{PAPER}"/>',
        ]

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        bold: bool = False,
        pale: bool = False,
        anchor: str = "start",
        size: float = 14,
        over: bool = False,
    ) -> None:
        """Draws text with its baseline at y."""
        weight = ' font-weight="600"' if bold else ""
        # So that a lane's line does not run through it.
        halo = f' stroke="{PAPER}" stroke-width="4" paint-order="stroke"' if over else ""
        self._parts.append(
            f'<text x="{x}" y="{y}" fill="{PALE if pale else INK}" text-anchor="{anchor}" '
            f'font-size="{size:g}"{weight}{halo}>{escape(words)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """A filled box with round corners."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" '
            f'stroke="{LINE}"/>'
        )

    def lines(self, x: float, y: float, head: str, *rest: str) -> None:
        """A heading and its lines."""
        self.text(x, y, head, bold=True)
        for number, words in enumerate(rest, start=1):
            self.text(x, y + 18 * number, words, size=13)

    def arrow(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        *,
        both: bool = False,
        dashed: bool = False,
    ) -> None:
        """An arrow from one point to another."""
        start = ' marker-start="url(#head)"' if both else ""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="1.4" '
            f'marker-end="url(#head)"{start}{dash}/>'
        )

    def rule(self, x: float, y1: float, y2: float) -> None:
        """A thin line downwards."""
        self._parts.append(f'<line x1="{x}" y1="{y1}" x2="{x}" y2="{y2}" stroke="{LINE}"/>')

    def save(self, name: str) -> None:
        """Writes it."""
        (PICTURES / name).write_text("\n".join([*self._parts, "</svg>", ""]), encoding="utf-8")


def processes() -> None:
    """Draws the processes, and what each may do."""
    picture = Picture(
        740,
        "Clients speak ZeroMQ to zeusd, the only process with CAP_SYS_ADMIN: its server reads "
        "users in turn, its core decides, its runtime keeps a journal and speaks with the driver",
    )
    picture.box(16, 16, 216, 84, USER)
    picture.lines(28, 38, "training job", "any user, no root", "import zeus  →  zeus_ipc")
    picture.box(248, 16, 216, 84, USER)
    picture.lines(
        260, 38, "zeusctl, exporter, yours", "any user, no root", "zeus_ipc, or ZeroMQ itself"
    )
    picture.arrow(124, 100, 124, 160, both=True)
    picture.arrow(356, 100, 356, 160, both=True)
    picture.text(240, 126, "ZeroMQ, msgpack", anchor="middle")
    picture.text(240, 144, "/run/zeusd/zeusd.sock", anchor="middle", pale=True, size=13)
    picture.box(16, 164, 448, 402, ROOT)
    picture.text(28, 188, "zeusd   (root, only CAP_SYS_ADMIN, no network)", bold=True)
    picture.box(28, 202, 424, 100, SERVER)
    picture.lines(
        40,
        224,
        "server: speaks ZeroMQ's protocol",
        "identity from the kernel; users in turn, a rate for",
        "each; decodes and validates. Closes protocol violators,",
        "and reads excess requests later",
    )
    picture.arrow(240, 302, 240, 338, both=True)
    picture.text(252, 325, "typed requests", size=13)
    picture.box(28, 342, 424, 62, PAPER)
    picture.lines(
        40,
        363,
        "core: decides",
        "leases, policy, restores. No socket, file or clock",
    )
    picture.arrow(240, 404, 240, 424, both=True)
    picture.box(28, 428, 424, 126, PAPER)
    picture.text(40, 449, "runtime: does the I/O", bold=True)
    for row, (left, right) in enumerate(
        (
            ("one loop for everything", "a worker for each GPU"),
            ("watch on each holder", "sampler: each update of power"),
            ("journal: intent first", "historian: energy of windows"),
        )
    ):
        picture.text(40, 473 + 24 * row, left, size=13)
        picture.text(236, 473 + 24 * row, right, size=13)
    picture.arrow(90, 566, 90, 622, both=True)
    picture.text(100, 598, "write, sync", size=13)
    picture.arrow(330, 566, 330, 622, both=True)
    picture.text(340, 590, "NVML: set, read", size=13)
    picture.box(16, 626, 196, 102, DEVICE)
    picture.lines(
        28,
        648,
        "/run/zeusd/state",
        "journal, histories",
        "zeusd-restore reads it,",
        "if zeusd cannot start",
    )
    picture.box(228, 626, 236, 102, DEVICE)
    picture.lines(
        240,
        648,
        "driver, GPUs",
        "power limit, clocks,",
        "persistence mode; sensors",
        "of power and energy",
    )
    picture.save("architecture.svg")


def _lanes(picture: Picture, lanes: list[tuple[float, str, str]], height: int) -> None:
    for x, name, fill in lanes:
        picture.box(x - 44, 16, 88, 30, fill)
        picture.text(x, 36, name, bold=True, anchor="middle", size=13)
        picture.rule(x, 46, height - 16)


def _step(
    picture: Picture, y: float, x1: float, x2: float, words: str, dashed: bool = False
) -> None:
    picture.arrow(x1, y, x2, y, dashed=dashed)
    middle = (x1 + x2) / 2
    picture.text(middle, y - 6, words, anchor="middle", size=12.5, over=True)


def _note(picture: Picture, x: float, y: float, *words: str, anchor: str = "start") -> None:
    for number, line in enumerate(words):
        picture.text(x, y + 16 * number, line, size=12.5, pale=True, anchor=anchor, over=True)


def one_set() -> None:
    """Draws the path of a set, and of the restore after a kill."""
    height = 760
    job, server, zeusd, disk, gpu = 60, 150, 240, 330, 420
    picture = Picture(
        height,
        "One set: the job asks, the server validates, the core decides; zeusd reads the GPU, "
        "writes the journal, writes the GPU and answers; when the job is killed zeusd reads, "
        "writes the old limit, and forgets",
    )
    _lanes(
        picture,
        [
            (job, "job", USER),
            (server, "server", SERVER),
            (zeusd, "core", ROOT),
            (disk, "journal", DEVICE),
            (gpu, "GPU", DEVICE),
        ],
        height,
    )
    _step(picture, 82, job, server, "set 200 W")
    _note(picture, server + 8, 104, "this user's turn? identity", "from the kernel; validates")
    _step(picture, 152, server, zeusd, "typed")
    _note(
        picture,
        zeusd + 8,
        174,
        "permitted? within the range?",
        "who holds it?",
    )
    _step(picture, 226, zeusd, gpu, "first set: read the value")
    _step(picture, 258, gpu, zeusd, "250 W", dashed=True)
    _step(picture, 294, zeusd, disk, "250 → 200")
    _step(picture, 326, disk, zeusd, "on disk", dashed=True)
    _step(picture, 362, zeusd, gpu, "set 200 W, its own thread")
    _step(picture, 394, gpu, zeusd, "done, 10 to 20 ms", dashed=True)
    _step(picture, 426, zeusd, server, "{}", dashed=True)
    _step(picture, 458, server, job, "{}", dashed=True)
    picture.text(job, 504, "killed", bold=True, anchor="middle", over=True)
    _step(picture, 536, job, zeusd, "the pidfd reports it", dashed=True)
    _note(picture, zeusd + 8, 558, "restoring: no holder")
    _step(picture, 600, zeusd, gpu, "still 200 W?")
    _step(picture, 632, gpu, zeusd, "yes", dashed=True)
    _step(picture, 664, zeusd, gpu, "set 250 W")
    _step(picture, 696, gpu, zeusd, "done", dashed=True)
    _step(picture, 728, zeusd, disk, "forget")
    picture.save("architecture_set.svg")


def one_window() -> None:
    """How the energy of a window comes about."""
    height = 620
    job, zeusd, gpu = 76, 250, 410
    picture = Picture(
        height,
        "One window: zeusd reads the sensors at each update; the job only reads the "
        "clock at the window's begin and end, and asks later for the energy between the two",
    )
    _lanes(picture, [(job, "job", USER), (zeusd, "zeusd", ROOT), (gpu, "GPU", DEVICE)], height)
    for y in (84, 164, 244, 324, 404):
        _step(picture, y, gpu, zeusd, "update: energy, power")
    picture.box(job - 12, 122, 24, 178, USER)
    _note(picture, job + 18, 130, "begin_window:", "wait for the GPU,", "read the clock")
    _note(picture, job + 18, 216, "work")
    _note(picture, job + 18, 288, "end_window:", "the same, 1 µs")
    _note(picture, zeusd + 10, 188, "dates each change", "to some 0.1 ms")
    _note(picture, zeusd + 10, 348, "keeps updates for minutes,", "seconds for hours")
    _step(picture, 446, job, zeusd, "energy from t1 to t2?")
    _note(picture, job + 8, 466, "when it is first read; up", "to 256 windows at once")
    _note(picture, zeusd + 10, 436, "waits for the update that", "covers t2, if necessary")
    _note(picture, zeusd + 10, 484, "divides each update's energy", "over its time")
    _step(picture, 540, zeusd, job, "26.0 J ± 0.5 J", dashed=True)
    _note(picture, job - 60, 584, "Both clocks are CLOCK_MONOTONIC of one node.")
    picture.save("architecture_window.svg")


if __name__ == "__main__":
    processes()
    one_set()
    one_window()
