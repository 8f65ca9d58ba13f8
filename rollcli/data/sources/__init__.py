"""Where problems come from, by name."""

BUILTIN = {
    "dataset": "rollcli.data.sources.dataset:DatasetSource",
    "reasoning_gym": "rollcli.data.sources.reasoning_gym:ReasoningGymSource",
    "sums": "rollcli.data.sources.sums:SumsSource",
}
