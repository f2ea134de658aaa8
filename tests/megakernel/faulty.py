"""Faults: in an op of the interpreter, which everything after it then computes with, and tasks that do nothing."""

import dataclasses

import torch

from megakernel import abi, vm


def idle(table, tasks):
    """The table with tasks that do nothing, and that no event learns of."""
    records = table.tasks.copy()
    for task in tasks:
        records[task]["code"], records[task]["trigger_count"] = abi.code("nothing"), 0
    return dataclasses.replace(table, tasks=records)


class Faulty(vm.Machine):
    """A machine that runs `spoil(self, task, position)` after each task of one op; `task` is the graph's."""

    def __init__(self, table, memory, op, spoil):
        super().__init__(table, memory)
        for record, task in zip(self.tasks, table.graph.tasks, strict=True):
            if task.op == op.index:
                record.task = task
        codes = list(self.codes)

        def run(record, args, step):
            codes[record.code](record, args, step)
            if hasattr(record, "task"):
                spoil(self, record.task, self.launch.position + step)

        self.codes = [run] * len(codes)


def scale(machine, task, position, factor=1.5):
    """Everything that the task wrote, times a factor; of chunks of attention the outputs only."""
    for part in task.writes:
        view, tensor = machine.memory.tensor(part.tensor), machine.memory.graph.tensors[part.tensor]
        if part.tensor.endswith("attn_partials"):
            width = tensor.cols // machine.config.num_attention_heads
            view = view[part.rows[0], part.cols[0] // width : part.cols[1] // width, :width]
        elif tensor.kind == "cache":
            view = view[position, slice(*part.cols)]
        else:
            view = view[part.at] if tensor.count > 1 else view
            view = view[slice(*part.rows)] if view.dim() == 1 else view[slice(*part.rows), slice(*part.cols)]
        view *= factor


def choose(ranks):
    """A spoil of MOE_GATE_TOPK or MOE_TOPK: the experts of these ranks (0: most likely) with their probabilities."""

    def spoil(machine, task, position):
        routing = machine.memory.routing(machine.memory.graph.ops[task.op].layer)
        scores = routing.logits.softmax(0)
        ids = scores.sort(descending=True, stable=True).indices[list(ranks)]
        routing.ids.copy_(ids)
        routing.weights.copy_(scores[ids] * machine.config.routed_scaling_factor)

    return spoil


def another_token(machine, task, position):
    """A spoil of ARGMAX_REDUCE."""
    token = machine.memory.tensor("token")
    token.copy_((token + 1) % machine.config.vocab_size)


def another_argmax(machine, task, position):
    """A spoil of ARGMAX_PARTIAL: its largest logit is further on."""
    from megakernel import abi

    part = task.writes[0]
    record = machine.memory.tensor(part.tensor)[slice(*part.rows)]
    partial = record.cpu().numpy().reshape(-1).view(abi.dtype("Partial"))
    partial["argmax"] += 1
    record.copy_(torch.from_numpy(partial.view(record.numpy().dtype)).view(record.shape))
