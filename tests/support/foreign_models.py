"""Model files of PyTorch and scikit-learn, and their expected results: `python -m tests.support.foreign_models KIND
FOLDER`.

Runs in a separate process, because both libraries keep threads. Results are in FOLDER/NAME.npz, with the inputs.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests import ROOT

TORCH = ("image.pt", "words.pt", "program.pt2")
SKLEARN = ("numbers.joblib", "text.joblib", "line.pkl")


def make(kind: str, folder: Path) -> list[Path]:
    """The files of a kind, torch or sklearn."""
    command = [sys.executable, "-m", "tests.support.foreign_models", kind, str(folder)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return [folder / name for name in (TORCH if kind == "torch" else SKLEARN)]


def answers(path: Path) -> Mapping[str, Any]:
    with np.load(path.with_suffix(".npz")) as found:
        return dict(found)


def torch_files(folder: Path) -> None:
    """TorchScript, which has neither sizes nor types, and a program of torch.export, which has both."""
    import torch

    class Image(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3)
            self.pool = torch.nn.AdaptiveAvgPool2d(1)
            self.last = torch.nn.Linear(4, 6)

        def forward(self, image: Any) -> Any:
            return self.last(self.pool(self.conv(image)).flatten(1))

    class Words(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(1000, 8)

        def forward(self, ids: Any) -> Any:
            rows = self.embedding(ids % 1000)  # `infer --random` sends any number
            return rows.mean(1), rows

    warnings.simplefilter("ignore")  # TorchScript is deprecated
    torch.manual_seed(0)
    model, words = Image().eval(), Words().eval()
    image, small, ids = torch.rand(2, 3, 40, 24), torch.rand(2, 3, 8, 8), torch.tensor([[1, 4, 9]])
    torch.jit.trace(model, torch.zeros(1, 3, 32, 32)).save(folder / "image.pt")
    torch.jit.trace(words, ids).save(folder / "words.pt")
    rows = torch.export.Dim("rows")
    torch.export.save(torch.export.export(model, (small,), dynamic_shapes=({0: rows},)), folder / "program.pt2")
    layers = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    torch.save({f"layers.{name}": value for name, value in layers.state_dict().items()}, folder / "weights.pth")
    with torch.inference_mode():
        np.savez(folder / "weights.npz", scores=layers(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).softmax(1))
        np.savez(folder / "image.npz", image=image, scores=model(image))
        np.savez(folder / "words.npz", ids=ids, mean=words(ids)[0], rows=words(ids)[1])
        np.savez(folder / "program.npz", image=small, scores=model(small))


def sklearn_files(folder: Path) -> None:
    """A classifier of numbers, a pipeline of strings with string labels, and a regressor with two results."""
    import joblib
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LinearRegression, LogisticRegression
    from sklearn.pipeline import make_pipeline

    x = np.arange(12.0).reshape(6, 2) % 5
    numbers = LogisticRegression().fit(x, [0, 1, 0, 1, 0, 2])
    text = make_pipeline(CountVectorizer(), LogisticRegression()).fit(["good", "very good", "bad"], ["+", "+", "-"])
    line = LinearRegression().fit(x, x @ [[1, 2], [3, 4]])
    x = np.array([[1.0, 4.0], [3.0, 0.5], [2.0, 2.0]])
    words = ["very good", "bad bad"]
    np.savez(folder / "numbers.npz", x=x, label=numbers.predict(x)[:, None], probabilities=numbers.predict_proba(x))
    np.savez(folder / "text.npz", label=text.predict(words)[:, None], probabilities=text.predict_proba(words))
    np.savez(folder / "line.npz", x=x, label=line.predict(x))
    for name, model in zip(SKLEARN, (numbers, text, line), strict=True):
        joblib.dump(model, folder / name)


if __name__ == "__main__":
    {"torch": torch_files, "sklearn": sklearn_files}[sys.argv[1]](Path(sys.argv[2]))
