"""The numbers that must hold, as data, and whoever is to give them: rollcli as it is installed, or another project.

`properties` says what is right, `subject` is how rollcli answers, `suite` compares a subject's answers with it.
"""
