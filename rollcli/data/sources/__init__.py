"""Where problems come from, by name."""

BUILTIN = {
    "dataset": "rollcli.data.sources.dataset:DatasetSource",
    "frozen_lake": "rollcli.data.sources.frozen_lake:FrozenLakeSource",
    "reasoning_gym": "rollcli.data.sources.reasoning_gym:ReasoningGymSource",
    "seeds": "rollcli.data.sources.seeds:SeedsSource",
    "sokoban": "rollcli.data.sources.sokoban:SokobanSource",
    "sums": "rollcli.data.sources.sums:SumsSource",
    "webshop": "rollcli.data.sources.webshop:WebShopSource",
}
