"""The equations of a jaxpr."""

import jax


def primitives_of(jaxpr) -> list:
    equations = []
    for equation in jaxpr.eqns:
        equations.append(equation)
        for sub in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            if hasattr(sub, "jaxpr") or hasattr(sub, "eqns"):
                equations += primitives_of(getattr(sub, "jaxpr", sub))
    return equations
