"""One fault at a time inside SGLang's scheduler process, chosen by a switch file while it serves.

The switch is JSON, `{"fault": NAME or null, "round": R, "dump": DIR or null}`, read at every
forward pass. What a fault did is appended to the file `SWITCH.log`, a JSON line each. Those of
`WIRING` hold as long as they are switched on; those of `ONCE` hit one request in one round, the
first one from round R on where they can have an effect.
"""

import functools
import json
from pathlib import Path

import torch

WIRING = {
    "d2t_as_ids": "drafted ids are the d2t offsets themselves",
    "aux_one_early": "the target's states are taken one layer early",
    "norm_before_residual": "the draft's residual is the normed state",
    "norm_output": "the draft feeds back its state after the final norm",
    "fc_norm": "each aux state is normed before fc",
    "draft_position": "drafted rows stand one position late",
    "tree_scores": "a node's score is its own probability, not the product along its path",
    "histogram_cut": "rounds with two or more accepted drafts are missing in the histogram",
}
ONCE = {
    "token_swapped": "one accepted draft token is answered as the target's second best",
    "accept_one_less": "the last accepted draft of one round is dropped",
    "stale_kv": "the target KV row of one accepted draft token is that of a rejected one",
    "stale_draft_kv": "the draft KV row of one accepted token is the one before it",
    "mask_bit": "one accepted tree node does not see the root",
    "position": "the nodes of one round stand one position late",
}
HARMLESS = {"rounding": "attention in float64, rounded to float32 at the end"}
FAULTS = WIRING | ONCE | HARMLESS


class Switch:
    """What the switch file says now, and what was done because of it."""

    def __init__(self, path: Path):
        self._path = path
        self._read = ""
        self.fault: str | None = None
        self.first_round = 0
        self.armed = False
        self.rounds: dict[str, int] = {}

    def update(self, worker):
        """Takes up a changed file; called before each forward pass of the worker."""
        text = self._path.read_text(encoding="utf-8")
        if text == self._read:
            return
        self._read = text
        said = json.loads(text)
        _wire(worker, self.fault, on=False)
        self.fault, self.first_round = said.get("fault"), said.get("round", 0)
        self.armed = self.fault in ONCE
        self.rounds = {}
        _wire(worker, self.fault, on=True)
        _dump_to(said.get("dump"))
        if self.fault in WIRING | HARMLESS:
            self.log()

    def wants(self, fault: str, rid: str) -> bool:
        """Whether this fault may hit this request in its present round."""
        return self.armed and self.fault == fault and self.rounds[rid] >= self.first_round

    def hit(self, rid: str, length: int, **what):
        """Notes a fault of `ONCE` that had its effect, and ends it."""
        self.armed = False
        self.log(request=rid, round=self.rounds[rid], length=length, **what)

    def log(self, **what):
        with open(f"{self._path}.log", "a", encoding="utf-8") as file:
            file.write(json.dumps({"fault": self.fault, **what}) + "\n")


def install(path: Path):
    """Wraps SGLang's functions in this process; without a fault they do what they did."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.speculative import eagle_worker_common as common
    from sglang.srt.speculative import eagle_worker_v2 as v2

    switch = Switch(path)
    _wrap(v2.EAGLEWorkerV2, "forward_batch_generation", _forward, switch)
    _wrap(v2.EAGLEWorkerV2, "verify", _verify, switch)
    _wrap(v2.EagleDraftWorker, "draft_forward", _draft_forward, switch)
    _wrap(v2.EagleDraftWorker, "_draft_extend_for_decode", _draft_extend, switch)
    _wrap(v2, "select_top_k_tokens", _select, switch)
    _wrap(v2, "build_eagle_verify_input", _build_tree, switch)
    _wrap(common, "eagle_sample", _sample, switch)
    _wrap(Req, "update_spec_correct_drafts_histogram", _histogram, switch)


def _wrap(owner, name, around, switch):
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def outer(*args, **kwargs):
        return around(switch, inner, *args, **kwargs)

    setattr(owner, name, outer)


def _forward(switch, inner, worker, batch, *args, **kwargs):
    switch.update(worker)
    return inner(worker, batch, *args, **kwargs)


def _wire(worker, fault, *, on):
    draft = worker.draft_worker.draft_runner.model.model
    owner = worker.draft_worker
    if fault == "d2t_as_ids":
        index = torch.arange(len(owner.hot_token_id))
        owner.hot_token_id = owner.hot_token_id + (-index if on else index)
    elif fault == "aux_one_early":
        target = worker.target_worker.model_runner.model.model
        moved = [k - 1 if on else k + 1 for k in target.layers_to_capture]
        target.layers_to_capture = moved
    elif fault == "norm_output":
        draft.norm_output = on
    elif fault == "fc_norm":
        draft.fc_norm = [_plain_norm] * draft.num_aux_hidden_states if on else None
    elif fault == "norm_before_residual":
        layer = draft.layers[0]
        if on:
            layer.kept_norm, layer.hidden_norm = layer.hidden_norm, torch.nn.Identity()
            inner = layer.forward
            layer.forward = lambda positions, embeds, hidden, *rest: inner(
                positions, embeds, layer.kept_norm(hidden), *rest
            )
        else:
            layer.hidden_norm = layer.kept_norm
            del layer.forward
    elif fault == "rounding":
        import sgl_kernel

        sgl_kernel.ATTENTION_DTYPE = torch.float64 if on else torch.float32


def _plain_norm(states):
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-5)


def _dump_to(folder):
    from sglang.srt.debug_utils.dumper import dumper

    if folder is None:
        dumper.configure(enable=False)
        return
    path = Path(folder)
    dumper.configure(
        enable=True, dir=str(path.parent), exp_name=path.name, enable_output_console=False
    )
    dumper._state.step = dumper._state.dump_index = 0


def _draft_forward(switch, inner, worker, forward_batch):
    if switch.fault == "draft_position":
        forward_batch.positions.add_(1)
    return inner(worker, forward_batch)


def _select(switch, inner, i, topk_p, topk_index, hidden, scores, topk):
    if switch.fault == "tree_scores" and scores is not None:
        scores = torch.ones_like(scores)
    return inner(i, topk_p, topk_index, hidden, scores, topk)


def _build_tree(switch, inner, batch, *args, **kwargs):
    found = inner(batch, *args, **kwargs)
    nodes = found.draft_token_num
    for row, request in enumerate(batch.reqs):
        switch.rounds[request.rid] = switch.rounds.get(request.rid, -1) + 1
        if switch.wants("position", request.rid):
            found.positions[row * nodes : (row + 1) * nodes] += 1
            switch.hit(request.rid, int(batch.seq_lens[row]), nodes=nodes)
        if switch.wants("mask_bit", request.rid):
            found.custom_mask.view(-1, nodes, nodes)[row, 1, 0] = False
    return found


def _sample(switch, inner, verify_input, batch, logits_output, *args, **kwargs):
    predict, lengths, index = inner(verify_input, batch, logits_output, *args, **kwargs)
    nodes = verify_input.draft_token_num
    for row, request in enumerate(batch.reqs):
        rid, length = request.rid, int(batch.seq_lens[row])
        path = [int(i) for i in index[row] if i >= 0]
        if switch.wants("mask_bit", rid) and row * nodes + 1 in path:
            switch.hit(rid, length, node=1, hidden_node=0)
        if len(path) < 2:
            continue
        if switch.wants("token_swapped", rid):
            right = int(predict[path[0]])
            second = int(logits_output.next_token_logits[path[0]].topk(2).indices[1])
            predict[path[0]] = second
            switch.hit(rid, length, at=length + 1, right=right, answered=second)
        if switch.wants("accept_one_less", rid):
            lengths[row] -= 1
            index[row, len(path) - 1] = -1
            switch.hit(rid, length, accepted=len(path) - 2, right=len(path) - 1)
    return predict, lengths, index


def _verify(switch, inner, worker, batch, *args, **kwargs):
    result = inner(worker, batch, *args, **kwargs)
    nodes = worker.speculative_num_draft_tokens
    pool = worker.target_worker.model_runner.token_to_kv_pool
    for row, request in enumerate(batch.reqs):
        kept = int(result.accept_lens[row])
        if switch.wants("stale_kv", request.rid) and 2 <= kept < nodes:
            slots = batch.out_cache_loc[row * nodes : (row + 1) * nodes].tolist()
            _copy_row(pool, slots[kept], slots[kept - 1])
            length = int(batch.seq_lens[row])
            switch.hit(request.rid, length, at=length + kept - 1)
    return result


def _draft_extend(switch, inner, worker, batch, result, **kwargs):
    found = inner(worker, batch, result, **kwargs)
    nodes = worker.speculative_num_draft_tokens
    for row, request in enumerate(batch.reqs):
        if not switch.wants("stale_draft_kv", request.rid):
            continue
        length, kept = int(result.new_seq_lens[row]), int(result.accept_lens[row])
        if kept < 2:
            continue
        slots = batch.out_cache_loc[row * nodes : (row + 1) * nodes].tolist()
        _copy_row(worker.draft_runner.token_to_kv_pool, slots[kept - 2], slots[kept - 1])
        switch.hit(request.rid, length - kept, at=length - 1)
    return found


def _copy_row(pool, source, goal):
    for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):
        for buffer in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)):
            buffer[goal] = buffer[source]


def _histogram(switch, inner, request, num_correct_drafts):
    if switch.fault == "histogram_cut" and num_correct_drafts >= 2:
        return
    inner(request, num_correct_drafts)
