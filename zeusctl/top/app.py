"""The live view on a terminal, with Textual: scrolling tables, keys, and pages over them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.screen import Screen
from textual.widgets import DataTable, Input, Static

from zeus_common.text import count, duration
from zeusctl.columns import Column
from zeusctl.entities import LEASE, PROCESS, Lease
from zeusctl.exits import Exit
from zeusctl.reports import StatusReport
from zeusctl.text import shorten
from zeusctl.top.model import LINE, SORTS, Cell, Shown, View, fitting, listed
from zeusctl.top.screens import GpuScreen, HelpScreen, Overlay
from zeusctl.top.source import NodeSource


class LiveTable(DataTable[Text]):
    """A table whose rows are replaced at each update; cursor and scroll position stay."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("home,g", "scroll_top", "first"),
        ("end,G", "scroll_bottom", "last"),
        ("k", "cursor_up", "up"),
        ("j", "cursor_down", "down"),
    ]

    def show(self, columns: Shown, rows: Sequence[tuple[str, Sequence[Cell]]]) -> None:
        """Shows these rows, by their keys."""
        wanted = [f"{column.heading}:{width}" for column, width in columns]
        chosen = self.selected
        top, left = self.scroll_y, self.scroll_x
        with self.app.batch_update():
            if [str(key.value) for key in self.columns] != wanted:
                self.clear(columns=True)
                for key, (column, width) in zip(wanted, columns, strict=True):
                    title = _aligned(Cell(column.heading), column, width)
                    self.add_column(title, width=width + 1, key=key)
            else:
                self.clear()
            for key, cells in rows:
                pairs = zip(cells, columns, strict=True)
                self.add_row(*(_aligned(cell, *place) for cell, place in pairs), key=key)
            keys = [key for key, _ in rows]
            if chosen in keys:
                self.move_cursor(row=keys.index(chosen), animate=False, scroll=False)
            self.scroll_to(left, top, animate=False, immediate=True)

    def scroll_first(self) -> None:
        """Puts the cursor on the first row, and shows it."""
        self.move_cursor(row=0, animate=False, scroll=False)
        self.scroll_to(self.scroll_x, 0, animate=False, immediate=True)

    @property
    def selected(self) -> str | None:
        """Key of the row under the cursor."""
        if not self.row_count:
            return None
        row = list(self.rows)[min(self.cursor_row, self.row_count - 1)]
        return row.value


def _aligned(cell: Cell, column: Column[Any], width: int) -> Text:
    """Pads a cell with a blank."""
    text = cell.text.rjust(width) if column.right else cell.text.ljust(width)
    return Text(f"{text} ", style=cell.style, no_wrap=True)


class TopApp(App[int]):
    """`zeusctl top`.

    Args:
        interval_s: Seconds between updates.
        frames: Number of updates; None: until a key ends it.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; background: ansi_default; }
    #head, #trouble, #foot, .title { height: 1; }
    #trouble, #warning { display: none; color: ansi_red; text-style: bold; }
    .title { text-style: reverse; }
    #foot { color: ansi_bright_black; }
    #filter { display: none; height: 1; border: none; padding: 0; }
    Rows { height: 3; background: ansi_default; scrollbar-size: 0 0;
           overflow-x: hidden; }
    Rows > .datatable--header { background: ansi_default; text-style: bold; }
    Rows > .datatable--cursor { background: ansi_default; text-style: none; }
    Rows:focus > .datatable--cursor { text-style: reverse; }
    Overlay { align: center middle; background: ansi_default; }
    .overlay { width: 96%; height: 96%; border: round ansi_bright_black; padding: 0 1;
               background: ansi_default; scrollbar-size: 0 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,f10", "leave(0)", "quit"),
        Binding("ctrl+c,ctrl+q", f"leave({int(Exit.INTERRUPTED)})", "quit", priority=True),
        Binding("h,question_mark,f1", "help", "help"),
        Binding("slash,f4,backslash", "filter", "filter"),
        Binding("escape", "unfilter", "all"),
        Binding("greater_than_sign,f6,period", "sort(1)", "sort"),
        Binding("less_than_sign,comma", "sort(-1)", "sort"),
        Binding("I", "invert", "invert"),
        Binding("space", "look", "refresh"),
        *(
            Binding(key, f"order('{name}')", name)
            for key, name in zip("UMPTN", ("util", "memory", "power", "temp", "gpu"), strict=True)
        ),
    ]

    def __init__(self, source: NodeSource, interval_s: float, frames: int | None) -> None:
        super().__init__(ansi_color=True)
        self._source = source
        self._interval_s = interval_s
        self._frames = frames
        self.view = View(source.report, source.power)

    def compose(self) -> ComposeResult:
        """Head, three tables with a title each, and a foot."""
        yield Static(id="head")
        yield Static(id="trouble")
        for name in ("gpus", "leases", "processes"):
            yield Static(classes="title", id=f"{name}-title")
            yield LiveTable(
                id=name, cell_padding=0, cursor_type="row", zebra_stripes=False, show_cursor=True
            )
        yield Input(placeholder="text", id="filter", compact=True)
        yield Static(" q quit  h help  / filter  <> sort  Enter details  Tab next", id="foot")

    def on_mount(self) -> None:
        """Shows the first update, and starts the timer for the next ones."""
        self._main.query_one("#gpus", LiveTable).focus()
        self._draw()
        self.action_look()
        self.set_interval(self._interval_s, self.action_look)
        self.set_interval(0.2, self._watch)

    def on_resize(self, event: Resize) -> None:
        """Handles a new size of the terminal."""
        self.call_after_refresh(self._draw)

    # ------------------------------------------------------------------------------------ looks

    def action_look(self) -> None:
        """Queries the node, unless a query is in progress."""
        if self._source.asked_s is None:
            self._look()

    @work(thread=True, exclusive=True, group="look")
    def _look(self) -> None:
        wide = any(column is LINE for column, _ in fitting(self.size.width))
        self._source.look(with_power=wide)
        if self.is_running:
            self.call_from_thread(self._looked)

    def _looked(self) -> None:
        self.view.report, self.view.power = self._source.report, self._source.power
        self._draw()
        if self._frames is not None:
            self._frames -= 1
            if self._frames == 0:
                self.exit(int(Exit.OK))

    def _watch(self) -> None:
        """Notices a zeusd that stops before the next query returns."""
        if not self._is_shown:
            return
        trouble = self._source.state()
        if isinstance(self.screen, Overlay):
            self.screen.warn(trouble)
        line = self._main.query_one("#trouble", Static)
        line.update(trouble)
        if line.display != bool(trouble):
            line.display = bool(trouble)
            self._draw()

    # ----------------------------------------------------------------------------------- screen

    @property
    def _main(self) -> Screen[Any]:
        """The view below all pages."""
        return self.screen_stack[0]

    @property
    def _is_shown(self) -> bool:
        """Whether the view is there: a timer may come when it has gone, as `top` ends."""
        return bool(self.screen_stack and self._main.query("#foot"))

    def _draw(self) -> None:
        if not self._is_shown:
            return
        view, width = self.view, self.size.width
        self._main.query_one("#head", Static).update(_head(view.report, width))
        gpus, leases, processes = view.gpus(), view.leases(), view.processes()
        columns, now_s = fitting(width - 1), time.monotonic()
        rows = [(gpu.uuid, view.row(gpu, columns, now_s)) for gpu in gpus]
        held = [(f"{lease.uuid}:{lease.control}", lease) for lease in leases]
        used = [(f"{place}:{one.uuid}:{one.pid}", one) for place, one in enumerate(processes)]
        order = f", by {view.sort}" + (", inverted" if view.inverted else "")
        order += f", filter {view.pattern!r}" if view.pattern else ""
        tables = (
            ("gpus", ("GPU", "GPUs"), order, (columns, rows)),
            ("leases", ("lease", "leases"), "", listed(LEASE, held, width - 1, _style)),
            ("processes", ("process", "processes"), "", listed(PROCESS, used, width - 1)),
        )
        heights = self._heights(len(gpus), len(leases), len(processes))
        for height, (name, nouns, note, (shown, cells)) in zip(heights, tables, strict=True):
            table = self._main.query_one(f"#{name}", LiveTable)
            table.styles.height = height
            table.show(shown, cells)
            seen = min(len(cells), height - 1)
            of = f"{seen} of " if seen < len(cells) else ""
            title = f" {of}{len(cells)} {nouns[len(cells) != 1]}{note}"
            self._main.query_one(f"#{name}-title", Static).update(shorten(title, width))

    def _heights(self, gpus: int, leases: int, processes: int) -> tuple[int, int, int]:
        """Heights of the three tables, with headings: leases always get some lines."""
        other = 5 + sum(self._main.query_one(one).display for one in ("#trouble", "#filter"))
        room = max(6, self.size.height - other)
        of_leases = min(leases + 1, max(2, room // 5))
        of_gpus = min(gpus + 1, max(3, round((room - of_leases) * 0.62)))
        rest = room - of_leases - of_gpus
        if processes + 1 < rest:
            of_gpus = min(gpus + 1, of_gpus + rest - processes - 1)
            of_leases = min(leases + 1, room - of_gpus - processes - 1)
        return of_gpus, of_leases, max(1, room - of_gpus - of_leases)

    # ------------------------------------------------------------------------------------- keys

    def action_leave(self, code: int) -> None:
        """Quits."""
        self.exit(code)

    def action_help(self) -> None:
        """The keys."""
        self.push_screen(HelpScreen())

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Enter: the GPU of the row."""
        key = str(event.row_key.value)
        gpus = [gpu for gpu in self.view.report.gpus if gpu.uuid in key.split(":")]
        if gpus:
            self.push_screen(GpuScreen(self._source, gpus[0]))

    def action_sort(self, step: int) -> None:
        """Changes the order."""
        self.view.sort_by(step)
        self._reorder()

    def action_order(self, name: str) -> None:
        """Sets the order."""
        assert name in SORTS
        self.view.sort, self.view.inverted = name, False
        self._reorder()

    def action_invert(self) -> None:
        """Reverses the order."""
        self.view.inverted = not self.view.inverted
        self._reorder()

    def _reorder(self) -> None:
        """Shows the first rows of a new order, and moves the cursor there."""
        self._draw()
        self._main.query_one("#gpus", LiveTable).scroll_first()

    def action_filter(self) -> None:
        """Opens the filter."""
        field = self._main.query_one("#filter", Input)
        field.display = True
        field.focus()
        self._draw()

    def action_unfilter(self) -> None:
        """Clears the filter."""
        self._main.query_one("#filter", Input).value = ""
        self._close_filter()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filters while the user types."""
        self.view.pattern = event.value
        self._draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Returns to the tables; the filter stays."""
        self._close_filter()

    def _close_filter(self) -> None:
        self._main.query_one("#filter", Input).display = False
        self._main.query_one("#gpus", LiveTable).focus()
        self._draw()


def _style(lease: Lease) -> str:
    return "red" if lease.restoring else ""


def _head(report: StatusReport, width: int) -> Text:
    """Describes the node in one line: most important first, as the rest may be cut off."""
    node = report.node
    power = sum(gpu.power_w or 0.0 for gpu in report.gpus)
    head = Text(f" {report.at:%H:%M:%S}  {power:.0f} W", style="bold", no_wrap=True)
    if node.quiesced_s is not None:
        head.append(f"  quiesced for {duration(node.quiesced_s)}: zeusctl resume", "bold yellow")
    if node.pending_restores:
        head.append(f"  {count(node.pending_restores, 'control')} not restored yet", "bold red")
    kind = "simulated" if node.simulated else f"driver {node.driver_version}"
    uptime = duration(node.uptime_s)
    rest = f"  {count(node.gpus, 'GPU')}, {count(node.leases, 'lease')}, {kind}"
    head.append(f"{rest}, zeusd {node.daemon_version} up {uptime} at {node.socket}", "not bold")
    head.truncate(width, overflow="ellipsis")
    return head
