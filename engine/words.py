"""The names that request fields and flags accept, in a module of their own, so that a command line's help imports
nothing else; the code that acts on a name imports it from here."""

DISTINCT = TEXT, TEXT_SUM = ("text", "text-sum")  # see `engine.contract.distinct`
SCORES = MODEL, RENORMALISED = ("model", "renormalised")  # see `engine.rules.Rules`
THINK = ("auto", "on", "off")  # see `engine.text.template.ChatTemplate`
OVERFLOW = ("drop-turns", "error")  # see `engine.conversation.Conversation`
ENTRY_POINTS = "coppice.searches"  # the group of the entry points of searches, see `search.outside`
POOLINGS = MEAN, LAST = ("mean", "last")  # see `engine.contract.embedding`
