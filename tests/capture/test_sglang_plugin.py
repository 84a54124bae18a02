"""The hooks against stand-ins for the server's objects: what the real server cannot be made to do on demand.

`fake_sglang` holds the names the plugin imports; that the hooks fit the real ones is test_sglang_server.py's business.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from eyas.capture.contract import LAST_PARAM, SPEC_PARAM, CaptureSpec, RequestId, ServerHello
from eyas.capture.recorder import Recorder
from eyas.capture.settings import SETTINGS_ENV, ServerSettings
from eyas.capture.spool import Spool

H, LAYERS = 8, (1, 3)
FAKE = Path(__file__).parent / "fake_sglang"
RID = str(RequestId("run00000", "sess0000", 0, 0))


@pytest.fixture(scope="module")
def plugin_module() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FAKE))
    try:
        yield importlib.import_module("eyas.capture.sglang_plugin")
    finally:
        sys.path.remove(str(FAKE))
        for name in [n for n in sys.modules if n.partition(".")[0] == "sglang"] + ["eyas.capture.sglang_plugin"]:
            del sys.modules[name]


@pytest.fixture
def plugin(plugin_module: ModuleType, tmp_path: Path) -> Iterator[Any]:
    """A plugin whose recorder is running, as after the model was loaded."""
    settings = ServerSettings(layers=LAYERS, spool=str(tmp_path / "spool"), dtype="f32")
    made = plugin_module.Plugin(settings)
    spec = CaptureSpec(LAYERS, "loss", "f32", H, 100, 8, "f" * 32)
    made.recorder = Recorder(spec, Spool(settings), is_over=plugin_module.is_over)
    yield made
    if made.recorder is not None:
        made.recorder.close()


class Request:
    """The fields of SGLang's `Req` that the plugin reads."""

    def __init__(self, rid: str, tokens: int, spec_id: str = "", runs: list[int] | None = None) -> None:
        self.rid = rid
        self.origin_input_ids = list(range(tokens))
        params = {SPEC_PARAM: spec_id, LAST_PARAM: runs or [], "__req__": object()}
        self.sampling_params = SimpleNamespace(custom_params=params)
        self.customized_info: dict[str, Any] | None = None
        self.retraction_count = 0
        self.finished_reason: Any = None
        self.to_finish: Any = None


WORKER = SimpleNamespace(is_draft_worker=False)


def batch(*shares: tuple[Request, int, int], decoding: tuple[Request, ...] = (), extend: bool = True) -> Any:
    """Requests with the [start, stop) each brings to one forward."""
    ids = [token for request, start, stop in shares for token in (request.origin_input_ids * 2)[start:stop]]
    return SimpleNamespace(
        reqs=[request for request, _, _ in shares],
        prefix_lens=[start for _, start, _ in shares],
        extend_lens=[stop - start for _, start, stop in shares],
        decoding_reqs=list(decoding) or None,
        forward_mode=SimpleNamespace(is_extend=lambda: extend),
        input_ids=torch.tensor(ids),
    )


def result(rows: int, padding: int = 0, **changes: Any) -> Any:
    output = {
        "hidden_states": torch.randn(rows + padding, len(LAYERS) * H),
        "last_hidden_states": torch.randn(rows + padding, H),
    }
    return SimpleNamespace(logits_output=SimpleNamespace(**{**output, **changes}))


def forward(plugin: Any, which: Any, brought: Any | None = None) -> None:
    plugin.after_forward(brought or result(sum(which.extend_lens)), WORKER, which)


def reply(request: Request) -> dict[str, Any]:
    assert request.customized_info is not None
    (only,) = request.customized_info["eyas"]
    return only


def ended(plugin: Any, rid: str) -> Path:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        for path in plugin.recorder.spool.folder.glob(f"{rid}.*"):
            return path
        time.sleep(0.005)
    raise AssertionError("neither record nor failure")


def test_without_settings_nothing_is_hooked(plugin_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = sys.modules["sglang.srt.plugins.hook_registry"].HookRegistry
    registry.hooks.clear()
    monkeypatch.delenv(SETTINGS_ENV, raising=False)
    plugin_module.register()
    monkeypatch.setenv(SETTINGS_ENV, "")
    plugin_module.register()
    assert registry.hooks == []
    monkeypatch.setenv(SETTINGS_ENV, "{}")
    with pytest.raises(ValueError, match=SETTINGS_ENV):
        plugin_module.register()
    assert registry.hooks == []


def test_an_older_server_gets_the_two_further_hooks(plugin_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = sys.modules["sglang.srt.plugins.hook_registry"].HookRegistry
    registry.hooks.clear()
    monkeypatch.setenv(SETTINGS_ENV, ServerSettings(layers=LAYERS, spool="/x").to_env())
    plugin_module.register()
    assert [target.rsplit(".", 2)[1:] for target, _, _ in registry.hooks] == [
        ["TpModelWorker", "get_worker_info"],
        ["TpModelWorker", "forward_batch_generation"],
        ["SchedulerOutputStreamer", "stream_output"],
        *(
            ["SchedulerWeightUpdaterManager", f"update_weights_from_{w}"]
            for w in ("disk", "distributed", "tensor", "ipc")
        ),
        ["ModelRunner", "init_attention_backends"],
        ["LogitsProcessor", "forward"],
    ]


def test_each_request_gets_its_own_rows(plugin: Any) -> None:
    """A mixed batch: a stranger, two own chunks, a decoding own request, and padding at the end."""
    spec = plugin.recorder.spec_id
    stranger, first = Request("abc", 9), Request(RID, 7, spec, [0, 7])
    second = Request(RID.replace("00000000", "00000001"), 5, spec, [1, 3])
    decoding = Request(RID.replace("00000000", "00000002"), 4, spec)
    which = batch((stranger, 0, 9), (first, 0, 7), (second, 0, 5), (decoding, 4, 5), decoding=(decoding,))
    brought = result(22, padding=10)
    forward(plugin, which, brought)
    assert reply(first)["status"] == reply(second)["status"] == "accepted"
    assert stranger.customized_info is None
    assert decoding.customized_info is None
    from safetensors.torch import load_file

    for request, start in ((first, 9), (second, 16)):
        got = load_file(ended(plugin, request.rid))
        rows = len(request.origin_input_ids)
        assert torch.equal(got["aux"].flatten(1), brought.logits_output.hidden_states[start : start + rows])
    assert torch.equal(load_file(ended(plugin, second.rid))["last"], brought.logits_output.last_hidden_states[17:19])


def test_the_answer_comes_with_the_last_chunk_and_only_once(plugin: Any) -> None:
    request = Request(RID, 10, plugin.recorder.spec_id, [0, 10])
    request.customized_info = {"other": [1]}
    forward(plugin, batch((request, 0, 6)))
    assert request.customized_info == {"other": [1]}
    forward(plugin, batch((request, 6, 10)))
    assert reply(request)["status"] == "accepted"
    assert request.customized_info["other"] == [1]
    request.retraction_count = 1
    forward(plugin, batch((request, 0, 12)))  # taken back while decoding: prompt and first tokens once more
    assert reply(request)["status"] == "accepted"
    assert ended(plugin, RID).suffix == ".safetensors"


def test_a_refused_request_stays_refused(plugin: Any) -> None:
    request = Request(RID, 10, plugin.recorder.spec_id, [0, 10])
    forward(plugin, batch((request, 3, 6)))
    assert reply(request)["reason"] == "prefix-cached"
    forward(plugin, batch((request, 6, 10)))
    assert reply(request)["reason"] == "prefix-cached"


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_states": None},
        {"last_hidden_states": None},
        {"hidden_states": torch.zeros(4, H)},
        {"hidden_states_token_indices": torch.arange(4)},
    ],
)
def test_a_forward_without_the_states_is_refused(plugin: Any, changes: dict[str, Any]) -> None:
    request = Request(RID, 4, plugin.recorder.spec_id)
    forward(plugin, batch((request, 0, 4)), result(4, **changes))
    assert reply(request)["reason"] == "no-states"


def test_an_error_of_ours_refuses_the_request_and_is_logged_once(plugin: Any, caplog: pytest.LogCaptureFixture) -> None:
    requests = [Request(RID.replace("00000000", f"0000000{n}"), 4, plugin.recorder.spec_id) for n in range(3)]
    for request in requests:
        request.sampling_params = None  # nothing like the server's own request
    with caplog.at_level(logging.ERROR):
        for request in requests:
            forward(plugin, batch((request, 0, 4)))
    assert len(caplog.records) == 1
    healthy = Request(RID.replace("00000000", "00000009"), 4, plugin.recorder.spec_id)
    forward(plugin, batch((healthy, 0, 4)))
    assert reply(healthy)["status"] == "accepted"
    assert [reply(request)["reason"] for request in requests] == ["plugin-error"] * 3


def test_a_batch_that_cannot_be_read_refuses_its_own_requests(plugin: Any) -> None:
    request, stranger = Request(RID, 4, plugin.recorder.spec_id), Request("abc", 4)
    which = batch((stranger, 0, 4), (request, 0, 4))
    which.extend_lens = [4]  # not one for each request
    forward(plugin, which)
    assert reply(request)["reason"] == "plugin-error"
    assert stranger.customized_info is None


@pytest.mark.parametrize("which", [None, SimpleNamespace(), SimpleNamespace(forward_mode=None, reqs=None)])
def test_nothing_is_ever_raised_into_the_server(plugin: Any, which: Any) -> None:
    assert plugin.after_forward(None, WORKER, which) is None
    assert plugin.after_worker_info((), SimpleNamespace(), which) is None
    assert plugin.before_attention_backends(SimpleNamespace()) is None


@pytest.mark.parametrize(
    "given",
    ["lora_id", "input_embeds", "positional_embed_overrides", "multimodal_inputs", "multi_item_delimiter_indices"],
)
def test_a_request_shaped_by_more_than_its_tokens_is_refused(plugin: Any, given: str) -> None:
    """Somebody else's adapter or image under our id: the record would claim that these are the model's own states."""
    request = Request(RID, 4, plugin.recorder.spec_id)
    setattr(request, given, object())
    forward(plugin, batch((request, 0, 4)))
    assert reply(request)["reason"] == "bad-request"
    assert given in reply(request)["detail"]
    assert not list(plugin.recorder.spool.folder.glob("*.safetensors"))


def test_a_sweep_that_fails_costs_no_row_of_its_forward(plugin: Any) -> None:
    class Untidy:
        """The recorder, except that it cannot tidy up."""

        def __init__(self, recorder: Any) -> None:
            self._recorder = recorder

        def __getattr__(self, name: str) -> Any:
            return getattr(self._recorder, name)

        def sweep(self) -> None:
            raise RuntimeError("made to fail")

    request, plugin.recorder = Request(RID, 4, plugin.recorder.spec_id), Untidy(plugin.recorder)
    forward(plugin, batch((request, 0, 4)))
    assert reply(request)["status"] == "accepted"
    assert ended(plugin, RID).suffix == ".safetensors"


def test_replaced_weights_end_capture_in_the_middle_of_a_prompt(plugin: Any) -> None:
    request, accepted = Request(RID, 10, plugin.recorder.spec_id), Request(RID[:-1] + "1", 4, plugin.recorder.spec_id)
    recorder = plugin.recorder
    forward(plugin, batch((request, 0, 6), (accepted, 0, 4)))
    assert plugin.before_weights_change(object(), object()) is None
    forward(plugin, batch((request, 6, 10)))
    assert reply(request)["reason"] == "plugin-error"
    assert "weights were replaced" in reply(request)["detail"]
    plugin.after_worker_info((0, 0, 0, 0, 0, 100), _worker(_Model(kept=[2, 4])))
    assert plugin.recorder is None
    recorder.close()
    assert [path.name for path in recorder.spool.folder.iterdir()] == [f"{accepted.rid}.safetensors"]


def test_a_draft_worker_is_ignored(plugin: Any) -> None:
    request = Request(RID, 4, plugin.recorder.spec_id)
    plugin.after_forward(result(4), SimpleNamespace(is_draft_worker=True), batch((request, 0, 4)))
    assert request.customized_info is None


def test_when_the_start_failed_every_own_request_hears_why(plugin_module: ModuleType, tmp_path: Path) -> None:
    made = plugin_module.Plugin(ServerSettings(layers=LAYERS, spool=str(tmp_path / "spool")))
    made.after_worker_info((0, 0, 0, 0, 0, 100), _worker(_Model(kept=[1, 2])))
    request, stranger = Request(RID, 4), Request("abc", 4)
    forward(made, batch((request, 0, 4), (stranger, 0, 4)))
    assert (reply(request)["reason"], reply(request)["spec_id"]) == ("plugin-error", "")
    assert "[0, 1]" in reply(request)["detail"]
    assert stranger.customized_info is None
    assert not (tmp_path / "spool").exists()


def test_start_writes_the_agreement(plugin_module: ModuleType, tmp_path: Path) -> None:
    made = plugin_module.Plugin(ServerSettings(layers=LAYERS, spool=str(tmp_path / "spool"), dtype="f32"))
    made.after_worker_info((0, 0, 0, 0, 0, 100), _worker(_Model(kept=[2, 4])))
    assert made.recorder is not None, made.failure
    hello = ServerHello.from_json((tmp_path / "spool" / "spec.json").read_text())
    assert hello.max_row_tokens == 99
    assert hello.provenance["layers_checked"] == "yes"
    assert CaptureSpec.from_dict(hello.spec) == made.recorder.spec
    assert json.loads((tmp_path / "spool" / "spec.json").read_text())["contract"] == 1
    made.recorder.close()


def test_other_tensor_parallel_ranks_stay_silent(plugin_module: ModuleType, tmp_path: Path) -> None:
    parallel = sys.modules["sglang.srt.runtime_context"].PARALLEL
    made = plugin_module.Plugin(ServerSettings(layers=LAYERS, spool=str(tmp_path / "spool")))
    parallel.attn_tp_rank = 1
    try:
        made.after_worker_info((0, 0, 0, 0, 0, 100), _worker(_Model(kept=[2, 4])))
    finally:
        parallel.attn_tp_rank = 0
    request = Request(RID, 4)
    forward(made, batch((request, 0, 4)))
    assert request.customized_info is None
    assert not (tmp_path / "spool").exists()


class _Model(torch.nn.Module):
    def __init__(self, kept: list[int]) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers_to_capture = kept
        self.norm = torch.nn.LayerNorm(H)
        self.set: tuple[str, list[int]] | None = None


def _worker(model: _Model, **server_args: Any) -> Any:
    text = SimpleNamespace(hidden_size=H, num_hidden_layers=8, vocab_size=100, num_attention_heads=2)
    return SimpleNamespace(
        is_draft_worker=False,
        model_runner=SimpleNamespace(model=model),
        model_config=SimpleNamespace(hf_text_config=text, dtype=torch.float32),
        server_args=SimpleNamespace(tp_size=1, dp_size=1, **server_args),
    )


@pytest.mark.parametrize("kept", [[2, 4], (2, 4), {4, 2}])
def test_layers_are_checked_as_the_server_numbers_them(plugin_module: ModuleType, kept: Any) -> None:
    model = _Model(kept)
    assert plugin_module.check_layers(model, LAYERS)
    with pytest.raises(ValueError, match=r"\[1, 3\]"):
        plugin_module.check_layers(model, (1, 2))


def test_layers_that_cannot_be_seen_are_not_vouched_for(plugin_module: ModuleType) -> None:
    assert plugin_module.check_layers(torch.nn.Linear(2, 2), LAYERS) is False


def _runner(model: Any, **server_args: Any) -> Any:
    return SimpleNamespace(
        is_draft_worker=False,
        model=model,
        model_config=SimpleNamespace(num_hidden_layers=8),
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        server_args=SimpleNamespace(**server_args),
    )


@pytest.mark.parametrize("setter", ["set_dflash_layers_to_capture", "set_eagle3_layers_to_capture"])
def test_an_older_server_is_told_the_layers(plugin: Any, setter: str) -> None:
    told: list[list[int]] = []
    plugin.before_attention_backends(_runner(SimpleNamespace(**{setter: told.append})))
    assert told == [[1, 3]]


@pytest.mark.parametrize("layers", [(1, 7), (8,)])
def test_a_layer_that_no_hook_can_keep_is_not_asked_for(plugin_module: ModuleType, layers: tuple[int, ...]) -> None:
    """The model would die in its first forward, and its server with it."""
    told: list[list[int]] = []
    made = plugin_module.Plugin(ServerSettings(layers=layers, spool="/x"))
    made.before_attention_backends(_runner(SimpleNamespace(set_dflash_layers_to_capture=told.append)))
    assert told == []
    assert "outputs of layers 0 to 6" in made.failure


@pytest.mark.parametrize("split", [{"pp_size": 2}, {"enable_two_batch_overlap": True}, {"attn_cp_size": 2}])
def test_forwards_split_in_ways_that_lose_rows_turn_capture_off(
    plugin_module: ModuleType, split: dict[str, Any], tmp_path: Path
) -> None:
    parallel, told = sys.modules["sglang.srt.runtime_context"].PARALLEL, []
    settings = ServerSettings(layers=LAYERS, spool=str(tmp_path / "spool"))
    older, newer = plugin_module.Plugin(settings), plugin_module.Plugin(settings)
    parallel.attn_cp_size = split.get("attn_cp_size", 1)
    try:
        older.before_attention_backends(_runner(SimpleNamespace(set_dflash_layers_to_capture=told.append), **split))
        newer.after_worker_info((0, 0, 0, 0, 0, 100), _worker(_Model(kept=[2, 4]), **split))
    finally:
        parallel.attn_cp_size = 1
    assert told == []
    for made in (older, newer):
        assert made.recorder is None
        assert "cannot be captured under" in made.failure


def test_a_server_with_a_draft_keeps_its_layers(plugin: Any) -> None:
    """Others would notice: their drafts would be made from other layers than they were trained on."""
    told: list[list[int]] = []
    runner = _runner(SimpleNamespace(set_eagle3_layers_to_capture=told.append))
    runner.spec_algorithm.is_none = lambda: False
    plugin.before_attention_backends(runner)
    assert told == []
    assert "speculatively" in plugin.failure


def test_layers_that_could_not_be_named_stay_off_when_the_model_is_loaded(
    plugin_module: ModuleType, tmp_path: Path
) -> None:
    """Without layers to keep, older servers bring the last state in place of the layers'."""
    made = plugin_module.Plugin(ServerSettings(layers=LAYERS, spool=str(tmp_path / "spool")))
    model = _Model(kept=[])
    made.before_attention_backends(_runner(model))
    made.after_worker_info((0, 0, 0, 0, 0, 100), _worker(model))
    request = Request(RID, 4)
    forward(made, batch((request, 0, 4)))
    assert reply(request)["reason"] == "plugin-error"
    assert "_Model cannot keep" in reply(request)["detail"]


def test_one_layer_that_cannot_be_seen_could_be_the_last_state(plugin_module: ModuleType, tmp_path: Path) -> None:
    made = plugin_module.Plugin(ServerSettings(layers=(3,), spool=str(tmp_path / "spool")))
    made.after_worker_info((0, 0, 0, 0, 0, 100), _worker(_Model(kept=[])))
    assert made.recorder is None
    assert "single layer" in made.failure


@pytest.mark.parametrize("short", ["hidden_states", "last_hidden_states", "input_ids"])
def test_rows_of_some_tokens_only_are_nobodys(plugin: Any, short: str) -> None:
    """Pruned to 8 of 10 rows, there are still enough for the first request: not one of them may be taken."""
    first, second = (Request(RID.replace("00000000", f"0000000{n}"), 5, plugin.recorder.spec_id) for n in range(2))
    which, brought = batch((first, 0, 5), (second, 0, 5)), result(10)
    if short == "input_ids":
        which.input_ids = which.input_ids[:8]
    else:
        setattr(brought.logits_output, short, getattr(brought.logits_output, short)[:8])
    forward(plugin, which, brought)
    assert [reply(request)["reason"] for request in (first, second)] == ["no-states"] * 2


def test_a_model_without_setter_turns_capture_off_by_name(plugin: Any) -> None:
    plugin.before_attention_backends(_runner(torch.nn.Linear(2, 2)))
    assert "Linear" in plugin.failure


def test_the_last_state_travels_on_its_own_output(plugin_module: ModuleType) -> None:
    states, output = torch.zeros(3, H), SimpleNamespace()
    plugin_module.attach_last(output, None, None, states, None, None)
    assert output.last_hidden_states is states
    plugin_module.attach_last(None, None, None, states)


def test_others_outputs_never_share_a_message_with_ours(plugin_module: ModuleType) -> None:
    own, stranger, silent = Request(RID, 1), Request("abc", 1), Request(RID, 1)
    own.customized_info = {"eyas": [{}]}
    sent: list[tuple[list[Request], Any, Any]] = []

    def original(streamer: Any, reqs: list[Request], logprob: bool, skip: Any = None) -> None:
        sent.append((list(reqs), logprob, skip))

    plugin_module.around_stream_output(original, None, [stranger, own, silent], True, skip="x")
    assert sent == [([stranger, silent], True, "x"), ([own], True, "x")]
    for alone in ([own], [stranger], []):
        sent.clear()
        plugin_module.around_stream_output(original, None, alone, False)
        assert sent == [(alone, False, None)]


class TouchyRequest:
    """A request whose extra info cannot be looked at for the `fails_at`-th time, over all requests of a batch."""

    looks = 0
    fails_at = 0

    def __init__(self, info: dict[str, Any] | None) -> None:
        self._info = info

    @property
    def customized_info(self) -> dict[str, Any] | None:
        TouchyRequest.looks += 1
        if TouchyRequest.looks == TouchyRequest.fails_at:
            raise RuntimeError("made to fail")
        return self._info

    @customized_info.setter
    def customized_info(self, info: dict[str, Any] | None) -> None:
        self._info = info


@pytest.mark.parametrize("fails_at", range(1, 9))
def test_every_output_is_sent_once_however_often_they_are_told_apart(plugin_module: ModuleType, fails_at: int) -> None:
    """Whatever look at a request fails, the hook does not raise: the scheduler would end, with everyone's requests."""
    reqs = [TouchyRequest({"eyas": [{}]}), TouchyRequest(None), TouchyRequest({"other": 1}), TouchyRequest(None)]
    sent: list[TouchyRequest] = []
    TouchyRequest.looks, TouchyRequest.fails_at = 0, fails_at
    plugin_module.around_stream_output(lambda _, some: sent.extend(some), None, reqs)
    assert TouchyRequest.looks >= min(fails_at, len(reqs))  # a second look at any of them is not taken
    assert sorted(map(id, sent)) == sorted(map(id, reqs))
