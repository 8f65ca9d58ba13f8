"""Environments by name."""

BUILTIN = {
    "agent": "rollcli.environments.agent:Agent",
    "dialogue": "rollcli.environments.dialogue:Dialogue",
    "duel": "rollcli.environments.duel:Duel",
    "frozen_lake": "rollcli.environments.frozen_lake:FrozenLake",
    "gem": "rollcli.environments.gem:Gem",
    "gym": "rollcli.environments.gym:Gym",
    "single_turn": "rollcli.environments.single_turn:SingleTurn",
    "sokoban": "rollcli.environments.sokoban:Sokoban",
    "textworld": "rollcli.environments.textworld:TextWorld",
    "tool": "rollcli.environments.tool:ToolUse",
    "webshop": "rollcli.environments.webshop:WebShop",
}
