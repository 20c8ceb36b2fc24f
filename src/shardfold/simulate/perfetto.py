"""A timeline in the trace format of Chrome and Perfetto: a track per stream, counters of memory.

Times are microseconds. Every span is a complete event (`X`) on the track of its stream; memory
is one counter (`C`) with a value a class.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardfold.simulate.schedule import Timeline
from shardfold.versioned_json import replace_file

PROCESS = 0


def trace_events(timeline: Timeline, title: str = "device") -> list[dict[str, Any]]:
    """The events of a trace, names of tracks first."""
    track = {stream: number for number, stream in enumerate(timeline.streams)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": title}}
    ]
    work = {span.stream for span in timeline.spans if span.kind == span.phase}
    for stream, number in track.items():
        named = {"name": stream if stream in work else f"links: {stream}"}
        thread = {"ph": "M", "pid": PROCESS, "tid": number}
        events.append({**thread, "name": "thread_name", "args": named})
        events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": number}})
    for span in timeline.spans:
        own = span.kind == span.phase
        events.append(
            {
                "ph": "X",
                "pid": PROCESS,
                "tid": track[span.stream],
                "name": span.operator if own else f"{span.kind} {span.operator}",
                "cat": span.phase,
                "ts": span.start_seconds * 1e6,
                "dur": (span.end_seconds - span.start_seconds) * 1e6,
                "args": {
                    "block": span.block,
                    "phase": span.phase,
                    "kind": span.kind,
                    "bytes": span.bytes,
                    "exposed_us": span.exposed_seconds * 1e6,
                },
            }
        )
    for sample in timeline.memory:
        events.append(
            {
                "ph": "C",
                "pid": PROCESS,
                "name": "memory",
                "ts": sample.seconds * 1e6,
                "args": sample.bytes,
            }
        )
    return events


def write_trace(timeline: Timeline, path: str | Path, title: str = "device") -> None:
    """Write a trace that chrome://tracing and ui.perfetto.dev open; never half of one."""
    text = json.dumps({"traceEvents": trace_events(timeline, title), "displayTimeUnit": "ms"})
    replace_file(Path(path), text)
