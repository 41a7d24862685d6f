"""The kernels that a process compiles, without those that it finds in the cache."""

from jax_memeff.codegen.toolchain import compile as compiler


def record() -> list[list[str]]:
    """A list that grows with each source compiled from now on: its kernels and architecture."""
    compiled: list[list[str]] = []
    compile_source = compiler.compile_source

    def recording(source, arch, names):
        result = compile_source(source, arch, names)
        if not result.cached:
            compiled.append([f"{name} {arch}" for name in names])
        return result

    compiler.compile_source = recording
    return compiled
