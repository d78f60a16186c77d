"""A FastAPI server as usually written by hand: a pydantic body with nested lists, `session.run` in the handler, lists back.

    python -m loadtest.peers.naive_fastapi --port 8002 --model model_repository/tiny/1/model.onnx --handler def

`--handler def` is the form that FastAPI's documentation recommends for a blocking call: it runs on a thread of
FastAPI's pool. `--handler async` runs the model on the event loop: faster for a model as small as `tiny`, but no other request
is answered while a model runs. `--handler raw` runs it there too, on the bytes of one float32 row, without pydantic: the fastest
handler that FastAPI allows. One session thread in all, which is the faster setting here.
"""

import numpy as np
import onnxruntime as ort
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from loadtest.peers import port_parser, serve


class PredictRequest(BaseModel):
    """Rows of features: `[N, 16]` for the model `tiny`."""

    input: list[list[float]]


class PredictResponse(BaseModel):
    """One row of results for each row sent."""

    output: list[list[float]]


def create_app(model_path: str, handler: str) -> FastAPI:
    """A FastAPI application with one route, `POST /predict`."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model_path, options, providers=["CPUExecutionProvider"])
    app = FastAPI()

    @app.get("/")
    async def ready() -> dict[str, bool]:
        return {"ready": True}

    def answer(request: PredictRequest) -> PredictResponse:
        output = session.run(None, {"input": np.asarray(request.input, dtype=np.float32)})[0]
        return PredictResponse(output=output.tolist())

    if handler == "def":

        @app.post("/predict")
        def predict(request: PredictRequest) -> PredictResponse:
            return answer(request)

    elif handler == "raw":

        @app.post("/predict")
        async def predict_raw(request: Request) -> Response:
            rows = np.frombuffer(await request.body(), np.float32).reshape(1, -1)
            output = session.run(None, {"input": rows})[0]
            return Response(output.tobytes(), media_type="application/octet-stream")

    else:

        @app.post("/predict")
        async def predict_on_loop(request: PredictRequest) -> PredictResponse:
            return answer(request)

    return app


def main() -> None:
    """Start from the command line."""
    parser = port_parser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--handler", choices=("def", "async", "raw"), default="def")
    options = parser.parse_args()
    serve(create_app(options.model, options.handler), options.port)


if __name__ == "__main__":
    main()
