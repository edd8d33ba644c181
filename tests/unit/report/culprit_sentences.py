"""Operations, and a culprit of each mechanism with the rows that a report prints."""

from __future__ import annotations

from typing import Any

from moeverify.results.culprit import CodeLine, Mechanism, Operation, SourceValue

HERE = Operation(
    operator="mul",
    line=CodeLine(
        file="mine/ffn.py",
        line=12,
        function="forward",
        expression="x * 0.9",
        lines=((11, "    # scaled"), (12, "    y = x * 0.9")),
    ),
    callers=(CodeLine(file="mine/model.py", line=30, function="forward"),),
    module="layers.0.ffn",
    step=2,
)
THERE = Operation(
    operator="add",
    line=CodeLine(
        file="one/ffn.py", line=7, function="forward", expression="x + b", lines=((7, "    y = x + b"),)
    ),
)
SAME_OPERATOR = THERE.model_copy(update={"operator": "mul_"})
OTHER = Operation(operator="mm", line=CodeLine(file="mine/ffn.py", line=9, expression="a @ w"))
WEIGHT = SourceValue(label="head.weight")
MADE = SourceValue(operation=THERE, step=2)
BY_AUTOGRAD = Operation(operator="sum", module="head", phase="backward", step=0)

X_B = "`x + b` (add), one/ffn.py:7 in forward"

CASES: dict[Mechanism, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "number": (
        {"numbers": (("0.9", "0.7"),), "there": THERE},
        [("here", "with 0.9"), ("reference", "with 0.7, one/ffn.py:7 in forward")],
    ),
    "operator": ({"there": THERE}, [("reference", X_B)]),
    "shared": (
        {"results": ("buffer/average",), "copy_of": "weight/head"},
        [("cause", "buffer/average has the memory of weight/head; on one device each has its own")],
    ),
    "dtype": ({"rounds_to": "bfloat16"}, [("here", "in bfloat16"), ("reference", "float64")]),
    "operand": (
        {
            "operand": 1,
            "taken": WEIGHT,
            "right": MADE,
            "there": THERE,
            "made": OTHER,
            "moves": (OTHER,),
            "moves_there": (THERE, OTHER),
        },
        [
            ("here", "input 2 is head.weight; made by `a @ w` (mm), mine/ffn.py:9"),
            ("via", "`a @ w` (mm), mine/ffn.py:9"),
            ("reference", f"input 2 is the result of {X_B}, step 2"),
            ("via", f"{X_B}, then `a @ w` (mm), mine/ffn.py:9"),
        ],
    ),
    "total": (
        {"axes": ("tp",), "taken": SourceValue(label="head.weight", over=("tp",))},
        [
            (
                "here",
                "its input is a part, over tp, of the sum head.weight; the reduction over tp comes later or never",
            )
        ],
    ),
    "share": (
        {"axes": ("tp",), "operand": 0, "made": MADE.operation},
        [
            (
                "here",
                f"input 1 is whole, made by {X_B}; the reduction over tp that follows counts it once for each part",
            )
        ],
    ),
    "whole": (
        {"right": WEIGHT, "there": THERE},
        [("here", "a part of head.weight"), ("reference", "all of it, one/ffn.py:7 in forward")],
    ),
    "removed": (
        {"axes": ("tp",)},
        [("here", "communicates over tp"), ("reference", "the value that it takes goes on unchanged")],
    ),
    "returned": (
        {"results": ("layers.0.router",), "taken": WEIGHT, "right": MADE, "there": THERE},
        [
            ("here", "`x * 0.9` (mul), mine/ffn.py:12 in forward, ranks 0, 1"),
            ("reference", f"the result of {X_B}, step 2"),
        ],
    ),
    "written": (
        {"made": OTHER},
        [
            (
                "here",
                "nothing wrote these values later. "
                "`a @ w` (mm), mine/ffn.py:9 wrote most of the tensors that are right",
            )
        ],
    ),
    "inserted": (
        {"numbers": (("mul", ""),), "right": WEIGHT},
        [("reference", "its input is first multiplied with head.weight")],
    ),
    "value": (
        {"there": THERE, "proved": False, "between": (OTHER, HERE)},
        [("reference", X_B), ("lines", "mine/ffn.py:9, mine/ffn.py:12 in forward")],
    ),
    "scale": (
        {"results": ("gradient/w",), "factor": 2.0, "axes": ("tp", "dp")},
        [("cause", "gradient/w is exactly 2 (tp or dp) times that of one device")],
    ),
    "group": (
        {"numbers": (("tp", "cp"),)},
        [("here", "over tp; its result is right over cp")],
    ),
    "unreduced": (
        {"numbers": (("maximum", "tp"),), "axes": ("tp",)},
        [("here", "each rank goes on with its own result; the maximum over tp is right")],
    ),
    "created": (
        {"numbers": (("4, 5 and more", "12, 13 and more"),), "there": THERE},
        [
            ("cause", "first wrong elements: made by `x * 0.9` (mul), mine/ffn.py:12 in forward, ranks 0, 1"),
            ("here", "elements 4, 5 and more; the right ones are 12, 13 and more"),
        ],
    ),
    "block": (
        {
            "numbers": (("", "tp"), ("[0:3] of dim 0", "[3:6] of dim 0")),
            "axes": ("tp",),
            "results": ("w", "v"),
        },
        [
            (
                "cause",
                "wrong block of a parameter: made by `x * 0.9` (mul), mine/ffn.py:12 in forward, ranks 0, 1",
            ),
            (
                "here",
                "rank 0 has [0:3] of dim 0 of w and 1 more tensor; [3:6] of dim 0 by its coordinate on tp",
            ),
        ],
    ),
    "owned": (
        {"numbers": (("rank 1", "3 of 128 rows (50, 97, 114)"),)},
        [
            (
                "cause",
                "first wrong operation: `x * 0.9` (mul), mine/ffn.py:12 in forward, ranks 0, 1; "
                "its zeros are in the wrong places",
            ),
            (
                "here",
                "of the part that rank 1 adds to a sum, 3 of 128 rows (50, 97, 114) should be zero: "
                "other ranks add them",
            ),
        ],
    ),
    "reduction": (
        {"results": ("gradient/w",), "axes": ("tp",)},
        [
            (
                "cause",
                "gradient/w is not reduced over tp: the values of these ranks add up to that of one device",
            )
        ],
    ),
    "moved": (
        {"results": ("gradient/w",), "taken": WEIGHT},
        [("cause", "gradient/w has the values of head.weight, up to their places")],
    ),
    "overwritten": (
        {"there": THERE},
        [("here", f"the backward pass of {X_B} takes the values that are written here")],
    ),
    "race": ({"there": THERE}, [("here", f"{X_B} may still use this memory: nothing has waited for it")]),
    "place": (
        {"proved": False, "between": (OTHER, HERE, HERE)},
        [("lines", "mine/ffn.py:9, mine/ffn.py:12 in forward")],
    ),
}
