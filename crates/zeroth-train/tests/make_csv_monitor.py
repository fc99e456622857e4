"""Makes csv_monitor.json: the files that DeepSpeed's csv_monitor writes for two steps of fp16 training.

Needs: deepspeed (0.19.8 made the committed file). Run it in this folder: python make_csv_monitor.py
"""

import json
import pathlib
import tempfile
import types

import deepspeed.monitor.csv_monitor as monitor

monitor.dist = types.SimpleNamespace(get_rank=lambda: 0)
HERE = pathlib.Path(__file__).parent
STEPS = {4: (2.5, 0.001, 65536.0), 8: (2.25, 0.0005, 32768.0)}

with tempfile.TemporaryDirectory() as folder:
    writer = monitor.csvMonitor(types.SimpleNamespace(enabled=True, output_path=folder, job_name="job"))
    for samples, (loss, rate, scale) in STEPS.items():
        writer.write_events([("Train/Samples/train_loss", loss, samples)])
        writer.write_events([("Train/Samples/lr", rate, samples), ("Train/Samples/loss_scale", scale, samples)])
    root = pathlib.Path(folder)
    files = {str(path.relative_to(root)): path.read_bytes().decode() for path in sorted(root.rglob("*.csv"))}
(HERE / "csv_monitor.json").write_text(json.dumps(files, indent=1) + "\n")
