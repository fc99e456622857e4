"""Makes tensorboard/*.tfevents with TensorBoard's own protobuf classes and record writer, and reads them back.

Needs: tensorboard (2.21 made the committed files). Run it in this folder: python make_tensorboard.py

With a folder as its argument it shows what TensorBoard reads there: python make_tensorboard.py RUN/tensorboard
"""

import math
import pathlib
import shutil
import sys
import tempfile

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

HERE = pathlib.Path(__file__).parent / "tensorboard"


def scalars(**values):
    pairs = [(name.replace("__", "/"), value) for name, value in values.items()]
    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in pairs])


FILES = {
    "first.tfevents": [
        Event(wall_time=1_700_000_000.25, file_version="brain.Event:2"),
        Event(wall_time=1_700_000_001.5, step=1, summary=scalars(train__loss=2.5, train__learning_rate=1e-5)),
        Event(wall_time=1_700_000_002.5, step=2, summary=scalars(train__loss=2.25, train__learning_rate=0.0)),
        Event(wall_time=1_700_000_003.5, step=300, summary=scalars(train__loss=math.nan)),
    ],
    # After a crash, as PyTorch's SummaryWriter(purge_step=2) begins.
    "resumed.tfevents": [
        Event(wall_time=1_700_000_100.0, step=2, file_version="brain.Event:2"),
        Event(wall_time=1_700_000_100.0, step=2, session_log=SessionLog(status=SessionLog.START)),
        Event(wall_time=1_700_000_101.0, step=2, summary=scalars(train__loss=2.125)),
    ],
}


def shown(folder):
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = sorted(accumulator.Tags()["scalars"])
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}


def make():
    HERE.mkdir(exist_ok=True)
    for name, events in FILES.items():
        with open(HERE / name, "wb") as file:
            writer = RecordWriter(file)
            for event in events:
                writer.write(event.SerializeToString())
    with tempfile.TemporaryDirectory() as folder:
        for seconds, name in enumerate(FILES):
            shutil.copy(HERE / name, pathlib.Path(folder) / f"events.out.tfevents.{1_700_000_000 + seconds}.host.1.0")
        found = shown(folder)
    # Steps 2 and 300 of the first file are superseded.
    assert found["train/loss"] == [(1, 2.5), (2, 2.125)], found
    assert [step for step, _ in found["train/learning_rate"]] == [1], found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for tag, points in shown(sys.argv[1]).items():
            print(tag, points)
    else:
        make()
