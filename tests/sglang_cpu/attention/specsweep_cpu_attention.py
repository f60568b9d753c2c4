"""SGLang plugin for CPU tests: the one attention backend that can verify drafts, on a CPU without AMX; and sampling.

SGLang turns `intel_amx` into `torch_native` where the CPU has no AMX, and `torch_native` cannot verify. Here
`torch_native` builds the `intel_amx` backend, whose operators `kernels/sgl_kernel` provides in torch.

On a CPU SGLang verifies greedily at every temperature. Here verify draws: the argmax of logits / T plus Gumbel noise is
a draw from the softmax at temperature T, so the greedy walk over such tokens is target sampling.
"""


def register():
    import sgl_kernel
    import torch
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    ATTENTION_BACKENDS["torch_native"] = ATTENTION_BACKENDS["intel_amx"]

    def note_verify(original, backend, q, k, v, layer, forward_batch, *args, **kwargs):
        sgl_kernel.attention.is_verifying = forward_batch.forward_mode.is_target_verify()
        return original(backend, q, k, v, layer, forward_batch, *args, **kwargs)

    def draw(original, verify_input, batch, logits_output, *args, **kwargs):
        sampling = batch.sampling_info
        if not sampling.is_all_greedy:
            logits = logits_output.next_token_logits
            temperatures = sampling.temperatures.repeat_interleave(verify_input.draft_token_num, dim=0)
            noise = -torch.empty_like(logits).exponential_().log()
            logits_output.next_token_logits = logits / temperatures + noise
        return original(verify_input, batch, logits_output, *args, **kwargs)

    backend = "sglang.srt.layers.attention.intel_amx_backend.IntelAMXAttnBackend"
    HookRegistry.register(f"{backend}.forward_extend", note_verify, HookType.AROUND)
    HookRegistry.register("sglang.srt.speculative.eagle_utils.eagle_sample", draw, HookType.AROUND)
