"""SGLang plugin for CPU tests: the one attention backend that can verify drafts, on a CPU without AMX.

SGLang turns `intel_amx` into `torch_native` where the CPU has no AMX, and `torch_native` cannot verify. Here
`torch_native` builds the `intel_amx` backend, whose operators `kernels/sgl_kernel` provides in torch.
"""


def register():
    import sgl_kernel
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    ATTENTION_BACKENDS["torch_native"] = ATTENTION_BACKENDS["intel_amx"]

    def note_verify(original, backend, q, k, v, layer, forward_batch, *args, **kwargs):
        sgl_kernel.attention.is_verifying = forward_batch.forward_mode.is_target_verify()
        return original(backend, q, k, v, layer, forward_batch, *args, **kwargs)

    backend = "sglang.srt.layers.attention.intel_amx_backend.IntelAMXAttnBackend"
    HookRegistry.register(f"{backend}.forward_extend", note_verify, HookType.AROUND)
