"""Algorithms by name. Modules here import no torch: losses call tensor methods, so a recipe is checked without it.

An algorithm is one module. What several share is in the building blocks beside them: `policy_gradient` (the frame),
`advantages`, `turns`, `surrogates`, `kl`, `correction`, `shaping`, `masking`, `aggregation`, `entropy`.
"""

BUILTIN = {
    "cispo": "rollcli.algorithms.cispo:Cispo",
    "dapo": "rollcli.algorithms.dapo:Dapo",
    "dr_grpo": "rollcli.algorithms.dr_grpo:DrGrpo",
    "gigpo": "rollcli.algorithms.gigpo:GiGpo",
    "grpo": "rollcli.algorithms.grpo:Grpo",
    "gspo": "rollcli.algorithms.gspo:Gspo",
    "kimi_k15": "rollcli.algorithms.kimi_k15:KimiK15",
    "lite_ppo": "rollcli.algorithms.lite_ppo:LitePpo",
    "max_rl": "rollcli.algorithms.max_rl:MaxRl",
    "opo": "rollcli.algorithms.opo:Opo",
    "ppo": "rollcli.algorithms.ppo:Ppo",
    "raft_pp": "rollcli.algorithms.raft_pp:RaftPp",
    "reinforce": "rollcli.algorithms.reinforce:Reinforce",
    "reinforce_pp": "rollcli.algorithms.reinforce_pp:ReinforcePp",
    "reinforce_pp_baseline": "rollcli.algorithms.reinforce_pp_baseline:ReinforcePpBaseline",
    "remax": "rollcli.algorithms.remax:ReMax",
    "rloo": "rollcli.algorithms.rloo:Rloo",
    "sapo": "rollcli.algorithms.sapo:Sapo",
    "sft": "rollcli.algorithms.sft:Sft",
    "star_po": "rollcli.algorithms.star_po:StarPo",
    "topr": "rollcli.algorithms.topr:Topr",
}
