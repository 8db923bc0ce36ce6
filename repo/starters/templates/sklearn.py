"""A scikit-learn model from a file that joblib or pickle wrote.

The risk: loading such a file runs any code that is in it, with the rights of the server. Serve only files that you, or
people whom you trust, have made, and let nobody else write to this directory. Load it with the version of scikit-learn
that saved it; another may refuse it or compute something else.

ONNX has neither problem, needs no scikit-learn, and is served faster. Where the model was trained:

    from skl2onnx import to_onnx    # pip install skl2onnx
    onnx = to_onnx(model, X[:1].astype("float32"), options={"zipmap": False})
    open("model.onnx", "wb").write(onnx.SerializeToString())

(options only for a classifier), then `shmserve init NAME --from model.onnx`.
"""

import functools
import importlib.util
import warnings
from pathlib import Path

import joblib
import numpy as np
import triton_python_backend_utils as pb_utils

MODEL = Path(__file__).with_name("model.joblib")
TYPES = {
    "f": ("TYPE_FP64", np.float64),
    "i": ("TYPE_INT64", np.int64),
    "u": ("TYPE_INT64", np.int64),
    "b": ("TYPE_BOOL", np.bool_),
}
"""Kind of a numpy type -> the type of an output. All others are sent as strings."""


@functools.cache
def load():
    if MODEL.exists():
        return joblib.load(MODEL)
    print(f"{MODEL.name} is missing: serving an example. joblib.dump(model, '{MODEL.name}') saves yours")
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(max_iter=1000).fit(*load_iris(return_X_y=True))


def predict(model, x):
    """The outputs, one row for each row of x. Numbers come as [rows, features], text as one string for each row."""
    if not hasattr(model, "n_features_in_"):  # a pipeline that begins with a vectorizer takes strings
        x = np.array([text.decode() for text in x.reshape(-1)], dtype=object)
    elif hasattr(model, "feature_names_in_") and importlib.util.find_spec("pandas"):  # it was trained with columns
        import pandas

        x = pandas.DataFrame(x, columns=model.feature_names_in_)
    outputs = {"label": np.asarray(model.predict(x))}
    if hasattr(model, "predict_proba"):
        probabilities = model.predict_proba(x)
        if isinstance(probabilities, np.ndarray):  # several labels have a list of arrays, which is left out
            outputs["probabilities"] = probabilities.astype(np.float32)
    label = outputs["label"]
    if label.dtype.kind not in TYPES:
        label = np.array([str(value).encode() for value in label.reshape(-1)], dtype=object).reshape(label.shape)
    else:
        label = label.astype(TYPES[label.dtype.kind][1])
    outputs["label"] = label.reshape(len(label), -1)
    return outputs


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        """Adds the inputs and outputs, which the model knows, to what config.pbtxt says."""
        model = load()
        features = getattr(model, "n_features_in_", None)
        if features is None:
            config.add_input({"name": "text", "data_type": "TYPE_STRING", "dims": [1]})
            row = np.array([[b"a"]], dtype=object)
        else:
            config.add_input({"name": "x", "data_type": "TYPE_FP64", "dims": [features]})
            row = np.zeros((1, features))
        for name, values in predict(model, row).items():
            kind = "TYPE_FP32" if values.dtype == np.float32 else TYPES.get(values.dtype.kind, ("TYPE_STRING",))[0]
            config.add_output({"name": name, "data_type": kind, "dims": list(values.shape[1:])})
        return config

    def initialize(self, args):
        # Without pandas, a model that was trained with named columns gets them in the same order, without names.
        warnings.filterwarnings("ignore", message="X does not have valid feature names")
        self.model = load()
        self.input = "x" if hasattr(self.model, "n_features_in_") else "text"

    def execute(self, requests):
        """Runs the requests of a batch together: their rows are joined, and the rows of the results are split again."""
        inputs = [pb_utils.get_input_tensor_by_name(request, self.input).as_numpy() for request in requests]
        results = predict(self.model, np.concatenate(inputs))
        responses, start = [], 0
        for rows in map(len, inputs):
            tensors = [pb_utils.Tensor(name, values[start : start + rows]) for name, values in results.items()]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
            start += rows
        return responses
