"""Compares mathematical expressions with math-verify in a process of its own, so that a deadline holds in any thread.

math-verify limits its time by SIGALRM, which only a main thread may use, and a thread that is stuck in sympy cannot be
stopped; a process can. What is compared, and the cheap cases that need no algebra, are left to `mathematics`.
"""

import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe

START_SECONDS = 120.0


class GradingError(Exception):
    """Two expressions could not be compared; this says nothing about whether the answer is right."""


class Grader:
    """One worker process, started at the first comparison and again after each one that ran out of time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def equal(self, given: Sequence[str], wanted: str, timeout_seconds: float) -> bool:
        """Whether one of the LaTeX texts `given` equals `wanted`; raises GradingError, also after the deadline."""
        with self._lock:
            connection = self._connection or self._start()
            connection.send((list(given), wanted))
            try:
                result = self._receive(connection, timeout_seconds)
            except GradingError as error:
                raise GradingError(f"{error} comparing {list(given)} with {wanted!r}") from None
        if isinstance(result, str):
            raise GradingError(result)
        return result

    def close(self) -> None:
        """End the worker process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None

    def _start(self) -> Connection:
        self._connection, theirs = Pipe()
        command = [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()})"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        atexit.register(self.close)
        theirs.close()
        self._receive(self._connection, START_SECONDS)
        return self._connection

    def _receive(self, connection: Connection, seconds: float) -> bool | str:
        try:
            if connection.poll(seconds):
                return connection.recv()
        except EOFError:
            self.close()
            raise GradingError("the grader ended") from None
        self.close()
        raise GradingError(f"no result within {seconds:g} s")


def serve(handle: int) -> None:
    """The worker: answer each pair with a truth value, or with the text of an error, until the other end closes."""
    connection = Connection(handle)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    from math_verify import parse, verify

    connection.send(True)
    while True:
        try:
            given, wanted = connection.recv()
        except EOFError:
            return
        expected = parse(wanted, parsing_timeout=None)
        if not expected:
            connection.send(f"the answer {wanted!r} cannot be read as mathematics")
            continue
        try:
            candidates = (parse(text, parsing_timeout=None) for text in given)
            equal = any(verify(expected, found, timeout_seconds=None, raise_on_error=True) for found in candidates)
            connection.send(equal)
        except Exception as error:  # sympy raises anything; the caller counts it
            connection.send(f"{type(error).__name__}: {error}")
