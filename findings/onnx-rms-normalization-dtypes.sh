#!/usr/bin/env bash
# onnx 1.23.2, ONNX Runtime 1.32.0, OpenVINO 2026.4.1, tract 0.23.9 (2026-11-29): RMSNormalization
# of opset 23 has a dtype of its own for the weight, and no tool tried here accepts one.
#
# Expected: the operator's schema has X: T, scale: V and Y: V, so a half input with f32 weights is
# valid and gives f32, which is what mixed precision wants. (LayerNormalization has one T.)
# Seen: onnx's own inference gives the output the input's dtype, so the full check rejects a model
# that declares either; its reference evaluator computes f16; ONNX Runtime, OpenVINO and tract
# reject the model when it is loaded. PyTorch 2.15 exports this model from an f32 RMSNorm of a
# half input.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  onnx==1.23.2 onnxruntime==1.32.0 openvino==2026.4.1 tract==0.23.9
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import numpy as np
import onnx
import onnxruntime as ort
import openvino
import tract
from onnx import TensorProto, helper, numpy_helper, reference

schema = onnx.defs.get_schema("RMSNormalization", 23)
print([(i.name, i.type_str) for i in schema.inputs], [(o.name, o.type_str) for o in schema.outputs])
assert [i.type_str for i in schema.inputs] == ["T", "V"] and schema.outputs[0].type_str == "V"

x = np.ones((2, 8), np.float16)


def model(weight, output):
    graph = helper.make_graph(
        [helper.make_node("RMSNormalization", ["x", "weight"], ["y"], epsilon=1e-5)],
        "norm",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, x.shape)],
        [helper.make_tensor_value_info("y", output, x.shape)],
        [numpy_helper.from_array(np.ones(8, weight), "weight")],
    )
    opsets = [helper.make_opsetid("", 23)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11)


def full_check(model):
    onnx.checker.check_model(model, full_check=True)
    return True


def evaluate(model):
    return reference.ReferenceEvaluator(model).run(None, {"x": x})[0].dtype


def onnx_runtime(model):
    providers = ["CPUExecutionProvider"]
    session = ort.InferenceSession(model.SerializeToString(), providers=providers)
    return session.run(None, {"x": x})[0].dtype


def open_vino(model):
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model.SerializeToString(), b""), "CPU")
    return compiled([x])[0].dtype


def run_tract(model):
    onnx.save(model, "model.onnx")
    return tract.onnx().load("model.onnx").into_model().into_runnable().run([x])[0].to_numpy().dtype


def outcome(tool, model):
    try:
        return str(tool(model))
    except BaseException as error:  # tract's error is not an Exception
        lines = str(error).strip().splitlines()
        print("   ", tool.__name__, type(error).__name__, lines[0][:90] if lines else "")
        return "rejected"


tools = (full_check, evaluate, onnx_runtime, open_vino, run_tract)
half = [outcome(tool, model(np.float16, TensorProto.FLOAT16)) for tool in tools]
mixed = {
    output: [outcome(tool, model(np.float32, output)) for tool in tools]
    for output in (TensorProto.FLOAT, TensorProto.FLOAT16)
}
print("half weights:", half)
print("f32 weights, declared f32:", mixed[TensorProto.FLOAT])
print("f32 weights, declared f16:", mixed[TensorProto.FLOAT16])
assert half == ["True"] + 4 * ["float16"], "half weights have changed"
for outcomes in mixed.values():
    assert outcomes == ["rejected", "float16", "rejected", "rejected", "rejected"], "this has changed"
EOF
