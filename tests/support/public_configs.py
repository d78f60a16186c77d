"""73 model configurations of public Triton repositories, with the verdict on each.

Each was read in the repository that `source` names. Tensor names, sizes, options and mistakes are those of the source;
the text is written anew. The model files are not the originals: `add_to` builds files that fit the configurations, so a
verdict concerns the configuration alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import onnx
from google.protobuf import text_format
from headrace.config.triton_messages import model_config_pb2
from onnx import TensorProto, helper

from loadtest.onnx_models import onnx_model
from tests.support import models

Kind = Literal["onnx", "python", "ensemble", "decoupled", "sequence", "iterative"]


class PublicConfig(NamedTuple):
    """One configuration.

    Attributes:
        name: folder of the model here.
        source: GitHub repository and the folder of the configuration in it.
        kind: feature that the model needs.
        text: `config.pbtxt`.
        refused: part of the finding if the configuration cannot be served even with its feature; "" if it is served.
        why: reason of the refusal, for the score in docs/from-triton.md.
    """

    name: str
    source: str
    kind: Kind
    text: str
    refused: str = ""
    why: str = ""


_NO_ARCHIVE = "the archive of its environment is not in the public repository"


def _dims(text: str) -> str:
    return f"dims: [ {text.replace(',', ', ')} ]"


def _tensors(field: str, specs: tuple[str, ...]) -> str:
    parts = []
    for spec in specs:
        name, datatype, dims, *more = spec.split(" ", 3)
        parts.append(f'{{ name: "{name}" data_type: TYPE_{datatype} {_dims(dims)} {" ".join(more)} }}')
    return f"{field} [ {', '.join(parts)} ]\n"


def ins(*specs: str) -> str:
    """Inputs: "NAME DATATYPE DIMS more fields", dims separated by commas."""
    return _tensors("input", specs)


def outs(*specs: str) -> str:
    """Outputs, written like inputs."""
    return _tensors("output", specs)


def step(model: str, inputs: str, outputs: str, version: int = -1) -> str:
    """A step of an ensemble; maps as "key=value key=value"."""
    maps = [("input_map", inputs), ("output_map", outputs)]
    lines = [
        f'{field} {{ key: "{key}" value: "{value}" }}'
        for field, pairs in maps
        for key, value in (pair.split("=") for pair in pairs.split())
    ]
    return f'{{ model_name: "{model}" model_version: {version} {" ".join(lines)} }}'


def steps(*texts: str) -> str:
    """The scheduling of an ensemble."""
    return f"ensemble_scheduling {{ step [ {', '.join(texts)} ] }}\n"


ONNX = 'platform: "onnxruntime_onnx"\n'
ORT = 'backend: "onnxruntime"\n'
PYTHON = 'backend: "python"\n'
ENSEMBLE = 'platform: "ensemble"\n'
CPU = "instance_group [ { kind: KIND_CPU } ]\n"
GPU = "instance_group [ { kind: KIND_GPU } ]\n"
DELAY = "dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }\n"
NVIDIA = "triton-inference-server"


def batch(rows: int) -> str:
    """Maximum batch size."""
    return f"max_batch_size: {rows}\n"


def group(count: int, kind: str = "CPU", more: str = "") -> str:
    """One instance group."""
    return f"instance_group [ {{ count: {count} kind: KIND_{kind} {more} }} ]\n"


PHOTO = ins("input FP32 3,224,224")
THOUSAND = outs("output FP32 1000")
WORDS = ins("input_ids INT64 -1", "attention_mask INT64 -1")

PUBLIC_CONFIGS: tuple[PublicConfig, ...] = (
    # ONNX models
    PublicConfig("densenet_onnx", f"{NVIDIA}/server docs/examples/model_repository/densenet_onnx", "onnx",
        ONNX + batch(1) + ins("data_0 FP32 3,224,224 format: FORMAT_NCHW")
        + outs('fc6_1 FP32 1000 reshape { shape: [ 1000, 1, 1 ] } label_filename: "densenet_labels.txt"')),
    PublicConfig("inception_onnx", f"{NVIDIA}/server docs/examples/model_repository/inception_onnx", "onnx",
        ONNX + batch(128) + ins("input FP32 299,299,3 format: FORMAT_NHWC")
        + outs('InceptionV3/Predictions/Softmax FP32 1001 label_filename: "inception_labels.txt"')),
    PublicConfig("sd_text_encoder", f"{NVIDIA}/server docs/examples/stable_diffusion/model_repository/text_encoder",
        "onnx", ONNX + batch(8) + ins("input_ids INT32 -1")
        + outs("pooler_output FP32 768", "last_hidden_state FP32 -1,768") + GPU + "optimization { graph : { level : 1 } }\n"
        'parameters { key: "execution_mode" value: { string_value: "1" } }\n'
        'parameters { key: "cudnn_conv_algo_search" value: { string_value: "0" } }\n'),
    PublicConfig("text_detection", f"{NVIDIA}/tutorials Conceptual_Guide/Part_1-model_deployment/text_detection", "onnx",
        ORT + batch(0) + ins("input_images:0 FP32 -1,-1,-1,3")
        + outs("feature_fusion/Conv_7/Sigmoid:0 FP32 -1,-1,-1,1") + outs("feature_fusion/concat_3:0 FP32 -1,-1,-1,5")),
    PublicConfig("text_recognition", f"{NVIDIA}/tutorials Conceptual_Guide/Part_1-model_deployment/text_recognition",
        "onnx", ORT + batch(0) + ins("input.1 FP32 1,1,32,100") + outs("307 FP32 1,26,37")),
    PublicConfig("text_tensorrt", f"{NVIDIA}/tutorials Conceptual_Guide/Part_4-inference_acceleration/ORT_TRT", "onnx",
        ORT + batch(16) + ins("input.1 FP32 1,32,100") + outs("308 FP32 26,37")
        + 'model_warmup { name: "text_recognition" batch_size: 16 inputs: { key: "input.1" value: {'
        " data_type: TYPE_FP32 dims: 1 dims: 32 dims: 100 zero_data: true } } }\n"
        'optimization { graph : { level : 1 } execution_accelerators { gpu_execution_accelerator : [ { name : "tensorrt",'
        ' parameters { key: "precision_mode" value: "FP16" },'
        ' parameters { key: "max_workspace_size_bytes" value: "1073741824" } }] } }\n'),
    PublicConfig("text_openvino", f"{NVIDIA}/tutorials Conceptual_Guide/Part_4-inference_acceleration/ORT_openvino",
        "onnx", ORT + batch(16) + ins("input.1 FP32 1,32,100") + outs("308 FP32 26,37")
        + 'optimization { execution_accelerators { cpu_execution_accelerator : [ { name : "openvino" } ] }}\n'),
    PublicConfig("text_cuda", f"{NVIDIA}/tutorials Conceptual_Guide/Part_4-inference_acceleration/ORT_cuda_ep", "onnx",
        ORT + batch(16) + ins("input.1 FP32 1,32,100") + outs("308 FP32 26,37")
        + 'parameters { key: "cudnn_conv_algo_search" value: { string_value: "0" } }\n'
        'parameters { key: "gpu_mem_limit" value: { string_value: "4294967200" } }\n'),
    PublicConfig("quick_deploy", f"{NVIDIA}/tutorials Quick_Deploy/ONNX", "onnx",
        ORT + batch(8) + "input: [ { name: 'input' data_type: TYPE_FP32 dims: [3, 224, 224] } ]\n"
        "output: [ { name: 'output' data_type: TYPE_FP32 dims: [1000] } ]\n"),
    PublicConfig("kozistr_embedding", "kozistr/triton-grpc-proxy-rs model_repository/embedding", "onnx",
        ONNX + ORT + 'default_model_filename: "model.onnx"\n' + batch(256) + WORDS + outs("embedding FP32 1024")
        + group(1, "GPU") + "dynamic_batching { preferred_batch_size: [ 1, 2, 4, 8, 16, 32, 64, 128, 256 ]"
        " max_queue_delay_microseconds: 100 }\n"),
    PublicConfig("devine_resnet50", "danieljdevine/model-serving-triton model_repository/resnet50", "onnx",
        ONNX + batch(8) + PHOTO + THOUSAND + group(1, "GPU") + DELAY),
    PublicConfig("devine_postprocess", "danieljdevine/model-serving-triton model_repository/postprocess", "onnx",
        ONNX + batch(8) + ins("input FP32 1000") + outs("output FP32 5,2") + group(1, "GPU") + DELAY),
    PublicConfig("aalekh_resnet50", "aalekh12/Cv-Interface-System- model_repository/resnet50", "onnx",
        ONNX + batch(8) + ins("data FP32 3,224,224") + outs("resnetv17_dense0_fwd FP32 1000") + DELAY),
    PublicConfig("jtulsiani_resnet50", "jtulsiani/triton-learning model_repository/resnet50", "onnx",
        ONNX + batch(0) + PHOTO + THOUSAND + CPU),
    PublicConfig("tojunn_resnet50", "ToJunn/OJT model_repository/resnet50", "onnx",
        ORT + batch(4) + ins("data FP32 3,224,224") + outs("resnetv17_dense0_fwd FP32 1000")),
    PublicConfig("ndtands_resnet", "ndtands/Speed_up_Model model_repository/model_onnx", "onnx",
        ONNX + batch(8) + PHOTO + THOUSAND),
    PublicConfig("softwaremill_resnet", "softwaremill/triton_playground model_repository/model_onnx", "onnx",
        ONNX + batch(8) + PHOTO + outs("output FP32 1000,1,1 reshape { shape: [ 1000 ] }")),
    PublicConfig("sporesight_yolov5", "ariezel/sporesight model_repository/yolov5", "onnx",
        ONNX + batch(0) + ins("images FP32 1,3,640,640 format: FORMAT_NONE") + outs("output0 FP32 1,25200,13")),
    PublicConfig("kapidhwaj_yolov8", "Kapidhwaj-AI/triton-server models/yolov8", "onnx",
        ONNX + batch(0) + ins("images FP32 1,3,640,640") + outs("output0 FP32 -1,-1,-1")),
    PublicConfig("hungmol_yolov8", "hungmol/triton_learning models/yolov8", "onnx",
        ONNX + batch(0) + ins("images FP32 1,3,480,640") + outs("output0 FP32 1,84,6300")),
    PublicConfig("shazy_yolo", "Shazy021/VisionPipeline model_repository/yolo", "onnx",
        ORT + "max_batch_size: 0  # disable autobatch\n" + ins("images FP32 1,3,-1,-1") + outs("output0 FP32 -1,-1,-1")),
    PublicConfig("detectify_yolo", "quangdungluong/detectify model_repository/yolo", "onnx",
        "parameters { key: \"metadata\" value { string_value: \"{'task': 'detect', 'batch': 1, 'imgsz': [640, 640],"
        " 'names': {0: 'person', 1: 'bicycle'}, 'args': {'half': False, 'dynamic': True}}\" } }\n"),
    PublicConfig("gupta_yolo", "vinay-gupta-kandula/triton-cv-service model_repository/yolo", "onnx",
        ONNX + batch(32) + ins("images FP32 3,640,640") + outs("output0 FP32 84,-1") + group(2)
        + "dynamic_batching { preferred_batch_size: [8, 16, 32] max_queue_delay_microseconds: 100 }\n"
        "version_policy: { all {} }\n"),
    PublicConfig("surya_yolo", "surya-4409/Triton-inference-service model_repository/yolo", "onnx",
        ORT + batch(32) + "input [ { name: \"images\", data_type: TYPE_FP32, dims: [ 3, 640, 640 ] } ]\n"
        "output [ { name: \"output0\", data_type: TYPE_FP32, dims: [ 84, -1 ] } ]\n"
        "dynamic_batching { preferred_batch_size: [8, 16, 32], max_queue_delay_microseconds: 100 }\n"
        "version_policy: { all: {} }\n"),
    PublicConfig("silero_vad", "LVCSRer2/silero-triton model_repository/silero_vad", "onnx",
        ONNX + batch(0) + ins("input FP32 -1,-1", "sr INT64 1", "h FP32 2,-1,64", "c FP32 2,-1,64")
        + outs("output FP32 -1,1", "hn FP32 2,-1,64", "cn FP32 2,-1,64") + group(4) + DELAY,
        refused="preferred_batch_size", why="a preferred batch size of a model without batches: Triton refuses it too"),
    PublicConfig("case_refine", "Maizesty/Case-Refine models/onnx_model", "onnx",
        ONNX + batch(128) + ins("/linear/fc/Gather_output_0 FP32 26,1", "/embedding/embedding/Gather_output_0 FP32 26,16")
        + group(5, "GPU", "gpus: [ 0 ]") + "dynamic_batching { max_queue_delay_microseconds: 100 }\n"),
    PublicConfig("jongmin_embedding", "jongmin-oh/triton-nlp-embedding model_repository/embedding", "onnx",
        ONNX + batch(0) + ins("input_ids INT64 1,-1", "attention_mask INT64 1,-1", "token_type_ids INT64 1,-1")
        + "output [ { name: \"output_0\", data_type: TYPE_FP32, dims: [-1, -1, 768] } ]\n" + group(1)),
    PublicConfig("psytechlab_bert", "psytechlab/tritoned_bert model_repository/model_onnx", "onnx",
        ORT + batch(1) + ins("input_ids INT64 -1", "attention_mask INT64 -1", "token_type_ids INT64 -1")
        + outs("logits FP32 6")),
    PublicConfig("revathi_classifier", "revathikrishapk/production-ml-inference model_repository/classifier", "onnx",
        ONNX + batch(8) + ins("input FP32 4") + outs("output FP32 3") + "dynamic_batching {}\n" + group(2)),
    PublicConfig("rikkana_classifier", "rikkana09/Triton-orchestrator model_repository/classifier", "onnx",
        ORT + batch(0) + ins("input_ids INT64 -1,128", "attention_mask INT64 -1,128", "token_type_ids INT64 -1,128")
        + outs("logits FP32 -1,2") + group(1)),
    PublicConfig("shokolatca_classifier", "shokolatca/triton_server_autodition model_repository/classifier", "onnx",
        ORT + ONNX + batch(8) + ins("features FP32 1,64,-1") + outs("logits FP32 17")
        + "instance_group [ { count: 1, kind: KIND_CPU } ]\n"),
    PublicConfig("quangdiy_bge", "QuangDiy/Embedding model_repository/bge-m3", "onnx",
        ONNX + batch(32) + WORDS + outs("sentence_embedding FP32 -1") + group(1)
        + "dynamic_batching { preferred_batch_size: [4, 8, 16] max_queue_delay_microseconds: 100 }\n"
        'optimization { execution_accelerators { cpu_execution_accelerator : [ { name : "onnxruntime" }] } }\n'),
    # Python models
    PublicConfig("python_add_sub", f"{NVIDIA}/python_backend examples", "python",
        PYTHON + ins("INPUT0 FP32 16") + ins("INPUT1 FP32 16") + outs("OUTPUT0 FP32 16") + outs("OUTPUT1 FP32 16") + CPU),
    PublicConfig("python_auto_complete", f"{NVIDIA}/python_backend examples/auto_complete", "python", PYTHON),
    PublicConfig("python_bls", f"{NVIDIA}/python_backend examples/bls", "python",
        PYTHON + ins("MODEL_NAME STRING 1") + ins("INPUT0 FP32 4") + ins("INPUT1 FP32 4")
        + outs("OUTPUT0 FP32 4") + outs("OUTPUT1 FP32 4") + CPU),
    PublicConfig("sd_pipeline", f"{NVIDIA}/server docs/examples/stable_diffusion/model_repository/pipeline", "python",
        PYTHON + batch(8) + ins("prompt STRING 1") + outs("generated_image FP32 -1,-1,-1") + GPU),
    PublicConfig("detection_postprocessing",
        f"{NVIDIA}/tutorials Conceptual_Guide/Part_5-Model_Ensembles/detection_postprocessing", "python",
        PYTHON + batch(256) + ins("detection_postprocessing_input_1 FP32 -1,-1,1",
        "detection_postprocessing_input_2 FP32 -1,-1,5", "detection_postprocessing_input_3 FP32 -1,-1,3")
        + outs("detection_postprocessing_output FP32 -1,-1,-1") + CPU),
    PublicConfig("python_vit", f"{NVIDIA}/tutorials HuggingFace/python_model_repository/python_vit", "python",
        PYTHON + batch(8) + ins("image FP32 -1,-1,-1") + outs("last_hidden_state FP32 -1,-1") + GPU),
    PublicConfig("falcon7b", f"{NVIDIA}/tutorials Quick_Deploy/HuggingFaceTransformers/falcon7b", "python",
        PYTHON + 'parameters: { key: "huggingface_model", value: {string_value: "tiiuae/falcon-7b"} }\n'
        'parameters: { key: "max_output_length", value: {string_value: "15"} }\n'
        + ins("text_input STRING 1") + outs("text_output STRING -1")),
    PublicConfig("idzorin_tokenizer", "IDZorin/MLOps_SBT model_repository/tokenizer", "python",
        PYTHON + batch(0) + "input { name: \"TEXTS\" data_type: TYPE_STRING dims: [ -1 ] }\n"
        "output { name: \"INPUT_IDS\" data_type: TYPE_INT32 dims: [ -1, 128 ] }\n"
        "output { name: \"ATTENTION_MASK\" data_type: TYPE_INT32 dims: [ -1, 128 ] }\n"
        "instance_group { count: 1 kind: KIND_CPU }\n"),
    PublicConfig("kirill_tokenizer", "Kirill-Tamogashev/Triton-ensemble-for-bert model_repository/tokenizer", "python",
        batch(0) + PYTHON + ins("TEXT STRING -1")
        + outs("input_ids INT64 -1,-1", "attention_mask INT64 -1,-1", "token_type_ids INT64 -1,-1") + group(1, "GPU")),
    PublicConfig("ner_tokenizer", "MrParosk/NER-serving model_repository/tokenizer", "python",
        PYTHON + batch(512) + "dynamic_batching { max_queue_delay_microseconds: 1000 }\n" + ins("input_text STRING 1")
        + outs("input_ids INT32 -1") + outs("token_type_ids INT32 -1") + outs("attention_mask INT32 -1")
        + outs("offset_mapping INT32 -1,2") + group(4)
        + 'parameters [ { key: "model_name" value: { string_value: "dslim/bert-base-NER" } } ]\n'),
    PublicConfig("ner_postprocess", "MrParosk/NER-serving model_repository/postprocess", "python",
        PYTHON + batch(512) + ins("input_text STRING 1") + ins("classes INT64 -1") + ins("offset_mapping INT64 -1,2")
        + outs("valid BOOL -1") + outs("token_array STRING -1") + outs("class_name_array STRING -1") + group(3)),
    PublicConfig("kozistr_tokenizer", "kozistr/triton-grpc-proxy-rs model_repository/tokenizer", "python",
        batch(256) + PYTHON + ins("text STRING 1") + outs("input_ids INT64 -1", "attention_mask INT64 -1")
        + group(1, "GPU")),
    PublicConfig("vehicle_preprocess", "dtduy77/vehicle_detection models/preprocess", "python",
        PYTHON + batch(0) + ins("preprocess_input FP32 -1,-1,3") + outs("preprocess_output FP32 1,3,448,448") + CPU),
    PublicConfig("detectron_preprocess", "tintn/deploy-detectron2-with-triton models/preprocess", "python",
        PYTHON + ins("image_bytes STRING 1") + outs("preprocessed_image UINT8 3,-1,-1")
        + 'parameters: { key: "EXECUTION_ENV_PATH", value: {string_value: "$$TRITON_MODEL_DIRECTORY/pyenv.tar.gz"} }\n',
        refused="pyenv.tar.gz", why=_NO_ARCHIVE),
    PublicConfig("tbell_preprocess", "tbell-dev/solution-ai-model models/preprocess", "python",
        PYTHON + ins("image_bytes STRING 1") + outs("preprocessed_image UINT8 3,-1,-1")
        + 'parameters: { key: "EXECUTION_ENV_PATH", value: {string_value: "/models/preprocess/pyenv.tar.gz"} }\n',
        refused="pyenv.tar.gz", why=_NO_ARCHIVE),
    PublicConfig("iacloud_whisper", "DayStayyy/ia-cloud model_repository/whisper", "python",
        PYTHON + batch(8) + ins("audio_file STRING 1", "request_type INT32 1") + outs("subtitles STRING 1", "text STRING 1")
        + group(1)),
    PublicConfig("inai_whisper", "Demiurg39/inai_hackaton_credit_score model_repository/whisper", "python",
        PYTHON + batch(1) + "dynamic_batching { }\n" + ins("audio_bytes STRING 1") + outs("transcript STRING 1") + GPU),
    PublicConfig("thuanthan_block", "thuanthan258/triton-demo-r21.08 models/ensemble", "python",
        PYTHON + 'default_model_filename: "/opt/tritonserver/triton-demo-r21.08/sample/abc-def/block_3"\n'
        + ins("INPUT0 STRING 2") + ins("INPUT1 FP64 2") + outs("OUTPUT0 STRING 2") + outs("OUTPUT1 FP64 2") + CPU,
        refused="default_model_filename", why="its file is a path outside of the model's folder"),
    PublicConfig("tatdat_bert", "tatdatnguyen/Triton_Demo model_repository/bert", "python",
        PYTHON + ins("text_input STRING -1") + outs("output STRING -1") + CPU),
    PublicConfig("conveyer_postprocess", "kuanyshbakytuly/project_conveyer model_repository/postprocess", "python",
        PYTHON + batch(32) + ins("INPUT_0 FP32 5,8400") + outs("num_detections INT32 1", "detection_boxes FP32 1000,4",
        "detection_scores FP32 1000", "detection_classes INT32 1000") + CPU),
    PublicConfig("bouchard_postprocess", "simon-bouchard/cv-inference-triton model_repository/postprocess", "python",
        PYTHON + batch(0) + ins("output0 FP32 1,84,8400")
        + "output [ { name: \"boxes\" data_type: TYPE_FP32 dims: [-1, 4] }\n"
        " { name: \"scores\" data_type: TYPE_FP32 dims: [-1] } { name: \"class_ids\" data_type: TYPE_INT32 dims: [-1] } ]\n"
        + CPU, refused="config.pbtxt", why="no commas between the elements of a list: Triton's reader refuses it too"),
    PublicConfig("suranchoi_embedding", "suranchoi/triton-multimodal-api model_repository/embedding", "python",
        PYTHON + batch(0) + ins("TEXT STRING -1", "MODEL_NAME STRING 1") + outs("EMBEDDINGS FP32 -1", "DIM INT32 1")
        + group(1, "MODEL")),
    # Ensembles
    PublicConfig("preprocess_resnet50", f"{NVIDIA}/server docs/examples/ensemble_model_repository/preprocess_resnet50",
        "ensemble", ENSEMBLE + batch(128) + ins("INPUT STRING 1") + outs("OUTPUT FP32 1000") + steps(
        step("image_preprocess_nchw_224x224x3_inception", "INPUT=INPUT", "OUTPUT=preprocessed_image"),
        step("resnet_graphdef", "input=preprocessed_image", "resnet_v1_50/predictions/Softmax=OUTPUT"))),
    PublicConfig("text_ensemble", f"{NVIDIA}/tutorials Conceptual_Guide/Part_5-Model_Ensembles/ensemble_model",
        "ensemble", ENSEMBLE + batch(256) + ins("input_image UINT8 -1") + outs("recognized_text STRING -1") + steps(
        step("detection_preprocessing", "detection_preprocessing_input=input_image",
             "detection_preprocessing_output=preprocessed_image"),
        step("text_detector", "input_images:0=preprocessed_image",
             "feature_fusion/Conv_7/Sigmoid:0=Sigmoid:0 feature_fusion/concat_3:0=concat_3:0"),
        step("detection_postprocess", "detection_postprocessing_input_1=Sigmoid:0"
             " detection_postprocessing_input_2=concat_3:0 detection_postprocessing_input_3=preprocessed_image",
             "detection_postprocessing_output=cropped_images"),
        step("text_recognizer", "input.1=cropped_images", "307=recognition_output"),
        step("recognition_postprocessing", "recognition_postprocessing_input=recognition_output",
             "recognition_postprocessing_output=recognized_text"))),
    PublicConfig("vit_ensemble", f"{NVIDIA}/tutorials HuggingFace/ensemble_model_repository/ensemble_model", "ensemble",
        ENSEMBLE + batch(4) + ins("image FP32 -1,-1,-1") + outs("last_hidden_state FP32 -1,-1") + steps(
        step("vit_preprocessing", "image=image", "pixel_values=pixel_values", 1),
        step("vit", "pixel_values=pixel_values", "last_hidden_state=last_hidden_state", 1))),
    PublicConfig("idzorin_ensemble", "IDZorin/MLOps_SBT model_repository/ensemble", "ensemble",
        ENSEMBLE + ins("TEXTS STRING -1") + outs("EMBEDDINGS_ONNX FP32 -1,2", "EMBEDDINGS_TRT_FP32 FP32 -1,2",
        "EMBEDDINGS_TRT_FP16 FP32 -1,2", "EMBEDDINGS_TRT_INT8 FP32 -1,2", "EMBEDDINGS_TRT_BEST FP32 -1,2") + steps(
        step("idzorin_words", "TEXTS=TEXTS", "INPUT_IDS=INPUT_IDS ATTENTION_MASK=ATTENTION_MASK"),
        *(step(f"model_{name}", "INPUT_IDS=INPUT_IDS ATTENTION_MASK=ATTENTION_MASK", f"EMBEDDINGS=EMBEDDINGS_{name}")
          for name in ("ONNX", "TRT_FP32", "TRT_FP16", "TRT_INT8", "TRT_BEST")))),
    PublicConfig("njorda_ensemble", "Njorda/trition-ensamble model_repository/ensemble", "ensemble",
        'name: "ensamble"\n' + ENSEMBLE + batch(256) + ins("INPUT UINT8 -1") + outs("OUTPUT FP32 1000") + steps(
        step("njorda_preprocess", "INPUT_0=INPUT", "OUTPUT_0=preprocessed_image"),
        step("resnet50_trt", "input=preprocessed_image", "output=processed_image"),
        step("njorda_postprocess", "INPUT_0=processed_image", "OUTPUT_1=OUTPUT")),
        refused='"ensamble"', why="its name is not that of its folder"),
    PublicConfig("blip_ensemble", "RavicharanN/triton-torch-BLIP model_repository/ensemble", "ensemble",
        ENSEMBLE + batch(8) + ins("INPUT_IMAGE STRING 1") + outs("OUTPUT STRING 1") + steps(
        step("food_classifier", "INPUT_IMAGE=INPUT_IMAGE", "FOOD_LABEL=FOOD_LABEL"),
        step("conditional_captioning", "INPUT=INPUT_IMAGE FOOD_LABEL=FOOD_LABEL", "OUTPUT=OUTPUT"))),
    PublicConfig("devine_ensemble", "danieljdevine/model-serving-triton model_repository/ensemble", "ensemble",
        ENSEMBLE + batch(8) + ins("input FP32 3,224,224") + outs("output FP32 5,2") + steps(
        step("devine_preprocess", "input=input", "output=preprocessed"),
        step("devine_model", "input=preprocessed", "output=logits"),
        step("devine_top", "input=logits", "output=output"))),
    PublicConfig("odlab_ensemble", "odlab-ai/odlab-triton model_repository/ensemble", "ensemble",
        ENSEMBLE + "max_batch_size: \ninput [ { name: \n data_type: \n dims: \n } ]\n" + steps(
        step("preprocess", "", ""), step("model", "", "")), refused="config.pbtxt", why="a form with its values left out"),
    PublicConfig("plate_ensemble", "rushai-dev/licence-plate-triton-server-ensemble model_repository/ensemble", "ensemble",
        ENSEMBLE + batch(64) + ins("INPUT UINT8 -1") + outs("OUTPUT STRING -1") + steps(
        step("plate_preprocess", "INPUT_0=INPUT", "OUTPUT_0=preprocessed_image"),
        step("yolo_detection", "images=preprocessed_image", "output0=OUTPUT_YOLO"),
        '{ model_name: "optical_character_recognition" model_version: -1'
        ' input_map [ { key: "INPUT_0" value: "OUTPUT_YOLO" }, { key: "INPUT_1" value: "INPUT" } ]'
        ' output_map { key: "OUTPUT_0" value: "OUTPUT" } }')),
    PublicConfig("kapidhwaj_ensemble", "Kapidhwaj-AI/triton-server models/ensemble", "ensemble",
        ENSEMBLE + batch(0) + ins("images FP32 1,3,640,640")
        + outs("num_detections INT32 1", "detection_bboxes FP32 -1,4", "detection_scores FP32 -1") + steps(
        step("kapidhwaj_detector", "images=images", "397=397 389=389 output0=outputs0"),
        step("kapidhwaj_postprocess", "INPUT_0=397 INPUT_1=389 INPUT_2=output0",
             "num_detections=num_detections detection_bboxes=detection_bboxes detection_scores=detection_scores")),
        refused="never ready", why="a step reads a tensor that no step writes: one of the two names is misspelt"),
    PublicConfig("da2so_ensemble", "da2so/tritonserver_example models/ensemble", "ensemble",
        ENSEMBLE + "input [ { name: \"raw_image\", data_type: TYPE_STRING, dims: [-1], } ]\n"
        "output [ { name: \"result\", data_type: TYPE_STRING, dims: [-1], } ]\n" + steps(
        step("da2so_preprocessing", "RAW_IMAGE=raw_image", "INPUT_IMAGE=input_image"),
        step("da2so_core", "INPUT__0=input_image", "OUTPUT__0=scores"),
        step("da2so_postprocessing", "SCORES=scores", "RESULT=result"))),
    PublicConfig("higgs_ensemble", "eric-moreno/boostedhiggs models/ensemble", "ensemble",
        ENSEMBLE + batch(0) + ins("pf FP32 -1,30,22", "pf_reg FP32 -1,30,10", "sv FP32 -1,5,13", "muon FP32 -1,2,16",
        "elec FP32 -1,2,20", "tau FP32 -1,3,18", "evt_z FP32 -1,11", "evt_reg FP32 -1,12")
        + outs("hadhad FP32 -1,3", "hadmu FP32 -1,1", "hadel FP32 -1,1", "MassReg_hadhad FP32 -1,2",
        "MassReg_hadmu FP32 -1,2", "MassReg_hadel FP32 -1,2", "Ztag_Zee_Zhe FP32 -1,1", "Ztag_Zmm_Zhm FP32 -1,3") + steps(
        step("hadhad", "inputParticle=pf inputSV=sv inputEvent=evt_z inputTau=tau", "output=hadhad"),
        step("hadel", "inputParticle=pf inputEl=elec inputSV=sv inputEvent=evt_z inputTau=tau", "output=hadel"),
        step("hadmu", "inputParticle=pf inputMu=muon inputSV=sv inputEvent=evt_z inputTau=tau", "output=hadmu"),
        *(step(f"MassReg_{name}", "inputParticle=pf_reg inputSV=sv inputEvent=evt_reg", f"output=MassReg_{name}")
          for name in ("hadhad", "hadel", "hadmu")),
        step("Ztag_Zee_Zhe", "inputParticle=pf inputSV=sv inputEvent=evt_z inputTau=tau inputEl=elec",
             "output=Ztag_Zee_Zhe"),
        step("Ztag_Zmm_Zhm", "inputParticle=pf inputSV=sv inputEvent=evt_z inputTau=tau inputMu=muon",
             "output=Ztag_Zmm_Zhm"))),
    PublicConfig("pythera_ensemble", "pythera-ai/aragserving models/ensemble", "ensemble",
        batch(0) + ENSEMBLE + ins("TEXT STRING -1") + "output { name: \"output_0\" data_type: TYPE_FP32 dims: [-1, -1] }\n"
        + steps('{ model_name: "tokenizer" model_version: -1 input_map { key: "TEXT" value: "TEXT" }'
        ' output_map [ { name: "input_ids" data_type: TYPE_INT32 dims: [-1] } ] }'),
        refused="config.pbtxt", why="tensors where the keys and values of a map belong: no valid text"),
    # Decoupled models and sequences
    PublicConfig("repeat_int32", f"{NVIDIA}/python_backend examples/decoupled/repeat", "decoupled",
        PYTHON + batch(0) + "model_transaction_policy { decoupled: True }\n"
        + ins("IN INT32 -1", "DELAY UINT32 -1", "WAIT UINT32 1") + outs("OUT INT32 1", "IDX UINT32 1")),
    PublicConfig("square_int32", f"{NVIDIA}/python_backend examples/decoupled/square", "decoupled",
        PYTHON + batch(0) + "model_transaction_policy { decoupled: True }\n" + ins("IN INT32 1") + outs("OUT INT32 1")),
    PublicConfig("vllm_model", f"{NVIDIA}/tutorials Quick_Deploy/vLLM/model_repository/vllm_model", "decoupled",
        PYTHON + batch(0) + "model_transaction_policy { decoupled: True }\n" + ins("text_input STRING 1",
        "stream BOOL 1 optional: true", "sampling_parameters STRING 1 optional: true") + outs("text_output STRING -1")
        + group(1, "MODEL") + 'parameters { key: "model" value: { string_value: "facebook/opt-125m", } }\n'),
    PublicConfig("simple_sequence", f"{NVIDIA}/server docs/examples/model_repository/simple_sequence", "sequence",
        ONNX + batch(8) + "sequence_batching { control_input [ { name: \"START\" control [ {"
        " kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] }, { name: \"READY\" control [ {"
        " kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] } ] }\n"
        + ins("INPUT INT32 1") + outs("OUTPUT INT32 1") + CPU),
    PublicConfig("simple_dyna_sequence", f"{NVIDIA}/server docs/examples/model_repository/simple_dyna_sequence",
        "sequence", 'platform: "custom"\ndefault_model_filename: "libdyna_sequence.so"\n' + batch(8)
        + "sequence_batching { max_sequence_idle_microseconds: 10000000 oldest { max_candidate_sequences: 1024"
        " max_queue_delay_microseconds: 10000 } control_input [ { name: \"CORRID\" control [ {"
        " kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] } ] }\n"
        + ins("INPUT INT32 1") + outs("OUTPUT INT32 1") + group(2),
        'platform "custom" is not served', "a shared library of Triton"),
    PublicConfig("iterative_gpt2", f"{NVIDIA}/tutorials Conceptual_Guide/Part_7-iterative_scheduling/iterative-gpt2",
        "iterative", PYTHON + "sequence_batching { iterative_sequence: true control_input: [{ name: \"correlation_id\""
        " control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }] oldest {}"
        " max_sequence_idle_microseconds: 400000000 }\n" + group(1, "GPU")),
)  # fmt: skip

# Python code that returns zeros of the configured shapes, and completes a configuration without inputs.
_MODEL_PY = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        if not config.as_dict()["input"]:
            config.add_input({"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [4]})
            config.add_output({"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [4]})
        return config

    def initialize(self, args):
        self.config = json.loads(args["model_config"])

    def execute(self, requests):
        batched = self.config["max_batch_size"] > 0
        responses = []
        for request in requests:
            rows = list(request.inputs()[0].as_numpy().shape[:1]) if batched else []
            tensors = []
            for output in self.config["output"]:
                dtype = pb_utils.triton_string_to_numpy(output["data_type"])
                shape = rows + [max(int(size), 1) for size in output["dims"]]
                tensors.append(pb_utils.Tensor(output["name"], np.zeros(shape, dtype)))
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
"""
_YOLO = ins("images FP32 1,3,640,640") + outs("output0 FP32 1,84,8400")
_TYPES = {"FP32": "FLOAT", "FP64": "DOUBLE"}


def add_to(repository: Path) -> None:
    """Write every configuration with a model file that fits it, and the models that ensembles call."""
    for config in PUBLIC_CONFIGS:
        folder = repository / config.name
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(config.text)
        for labels in ("densenet_labels.txt", "inception_labels.txt"):
            if labels in config.text:
                (folder / labels).write_text("\n".join(f"class {index}" for index in range(1001)))
        if PYTHON in config.text:
            (folder / "1" / "model.py").write_text(_MODEL_PY)
        elif config.kind == "ensemble":
            for name, model, text in _members(config):
                models.add_model(repository, name, model, config=text)
        else:
            (folder / "1" / "model.onnx").write_bytes(_onnx_file(config.text).SerializeToString())


def _message(text: str) -> Any:
    """Triton's message; raises ParseError if the text is none."""
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def _onnx_file(text: str) -> onnx.ModelProto:
    """A model with the inputs and outputs of a configuration; its outputs are zeros."""
    message = _message(text)
    if not message.input:
        message = _message(text + _YOLO)
    if not message.output:
        message = _message(text + outs("score FP32 1"))
    return _zeros(message)


def _declared(tensors: Any, batched: bool) -> dict[str, tuple[int, list[int | str]]]:
    """ONNX datatype and shape of each tensor of a configuration, by name."""
    declared = {}
    for tensor in tensors:
        dims = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
        shape: list[int | str] = [size if size >= 0 else f"{tensor.name}_{place}" for place, size in enumerate(dims)]
        name = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
        datatype = TensorProto.DataType.Value(_TYPES.get(name, name))
        declared[tensor.name] = (datatype, ["batch", *shape] if batched else shape)
    return declared


def _zeros(message: Any) -> onnx.ModelProto:
    batched = message.max_batch_size > 0
    inputs, outputs = _declared(message.input, batched), _declared(message.output, batched)
    for control in message.sequence_batching.control_input:  # those of the sample are INT32
        inputs[control.name] = TensorProto.INT32, ["batch", 1]
    constants: dict[str, Any] = {"first": np.array([0]), "second": np.array([1])}
    nodes = [
        helper.make_node("Shape", [next(iter(inputs))], ["shape"]),
        helper.make_node("Slice", ["shape", "first", "second"], ["rows"]),
    ]
    for place, (name, (datatype, shape)) in enumerate(outputs.items()):
        sizes = [size if isinstance(size, int) else 1 for size in shape[batched:]]
        constants[f"dims_{place}"] = np.array(sizes, np.int64)
        dtype = object if datatype == TensorProto.STRING else helper.tensor_dtype_to_np_dtype(datatype)
        constants[f"zero_{place}"] = np.array(["" if dtype is object else 0], dtype)
        parts = ["rows", f"dims_{place}"] if batched else [f"dims_{place}"]
        nodes.append(helper.make_node("Concat", parts, [f"shape_{place}"], axis=0))
        nodes.append(helper.make_node("Expand", [f"zero_{place}", f"shape_{place}"], [name]))
    return onnx_model(nodes, inputs, outputs, constants)


def _members(config: PublicConfig) -> Iterator[tuple[str, onnx.ModelProto, str]]:
    """Name, file and configuration of each model that an ensemble calls.

    Tensors between steps are FP32 of one free dimension. A configuration that cannot be read has no members.
    """
    try:
        message = _message(config.text)
    except text_format.ParseError:
        return
    tensors = {tensor.name: tensor for tensor in (*message.input, *message.output)}
    for each in message.ensemble_scheduling.step:
        text = batch(message.max_batch_size)
        for field, maps in (("input", each.input_map), ("output", each.output_map)):
            specs = []
            for key, value in maps.items():
                known = tensors.get(value)
                name = "FP32" if known is None else model_config_pb2.DataType.Name(known.data_type)
                dims = "-1" if known is None else ",".join(map(str, known.dims))
                specs.append(f"{key} {name.removeprefix('TYPE_')} {dims}")
            text += _tensors(field, tuple(specs))
        yield each.model_name, _onnx_file(text), text
