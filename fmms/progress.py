"""One line that says where a running notebook is: rewritten in place on a terminal, now and then in a log."""

import sys
import threading
import time


class Progress:
    """Follows one notebook. As a context manager it keeps the line current while a long cell runs.

    After the last `cell` call, `number` and `total` count the notebook's own cells (papermill's injected one not
    among them) and `source` is that cell's text.
    """

    LOG_EVERY = 30.0  # seconds between lines of a log while nothing changes
    LOG_CELLS = 2.0  # seconds at least between lines of a log when cells fly by

    def __init__(self, label: str, stream=None):
        self.label = label
        self.number, self.total, self.source = 0, 0, ""
        self._stream = sys.stdout if stream is None else stream
        self._terminal = self._stream.isatty()
        self._start = time.monotonic()
        self._said = float("-inf")
        self._done = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def __enter__(self) -> "Progress":
        self._say()
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._done.set()
        self._thread.join()

    def cell(self, cells, index: int) -> None:
        """The runner starts `cells[index]`."""
        own = ["injected-parameters" not in cell.metadata.get("tags", []) for cell in cells]
        self.total = sum(own)
        if own[index]:
            self.number, self.source = sum(own[: index + 1]), cells[index].source
        if self._terminal or time.monotonic() - self._said >= self.LOG_CELLS:
            self._say()

    def end(self, word: str) -> None:
        """Writes the last line: passed or failed, and how long it took."""
        self._done.set()
        self._write(f"{self.label}  {word}  {self.number}/{self.total} cells  {self.seconds:.0f} s", last=True)

    def _tick(self) -> None:
        while not self._done.wait(1.0):
            if self._terminal or time.monotonic() - self._said >= self.LOG_EVERY:
                self._say()

    def _say(self) -> None:
        where = f"cell {self.number}/{self.total} ..." if self.total else "starting ..."
        self._write(f"{self.label}  {where}  {self.seconds:.0f} s")

    def _write(self, line: str, last: bool = False) -> None:
        with self._writing:
            if self._done.is_set() and not last:
                return
            self._said = time.monotonic()
            if self._terminal:
                self._stream.write(f"\r\x1b[K{line}" + ("\n" if last else ""))
            else:
                self._stream.write(f"{line}\n")
            self._stream.flush()
