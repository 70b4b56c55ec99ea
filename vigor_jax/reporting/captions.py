"""What stands below the report's figures: how to read them."""

ACCURACY_CAPTIONS = (
  (
    "rollouts",
    "Every generated rollout counts, also those that were not trained on.",
  ),
  (
    "tokens",
    "The same against generated tokens: rules that prefer long "
    "answers pay for them here.",
  ),
  (
    "seconds",
    "The same against time in training steps. Evaluation is left "
    "out, and steps that compiled count as a median step.",
  ),
)
TARGET_CAPTION = (
  "Spending up to the target, geometric mean over seeds; > where runs never "
  "got there. In brackets and under x: baseline / rule, above 1 the rule is "
  "cheaper."
)
HEAT_CAPTION = (
  "Each row is a round, each column a prompt, sorted by how many rollouts "
  "it got. White: none. A rule that concentrates is dark at the left in late "
  "rows."
)
SIZES_CAPTION = (
  "How many rollouts a prompt got in one step. Adaptive rules make this "
  "skewed to the right: few prompts get many."
)
RATES_CAPTION = (
  "Mass near 0 and 100 % carries no signal. Adaptive rules gain where this "
  "is U-shaped and can lose where it is not."
)
LEVEL_CAPTION = (
  "Levels come with the data. A rising line says that the budget follows the "
  "policy to harder prompts."
)
VARIANCE_CAPTION = (
  "Mean reward variance of the prompts that rollouts were spent on. Only "
  "fresh rollouts measure it without bias: a rule's own rollouts were "
  "selected for looking variable."
)
SIGNAL_CAPTION = (
  "A group whose rewards are all alike has advantage 0. Adaptive rules have "
  "more such groups, but spend fewer rollouts in them."
)
MIXED_CAPTION = (
  "Concentrating the budget lowers this number. Distinct mixed prompts "
  "matter more than the share of rollouts with signal."
)
TIME_CAPTION = "Median over steps, so that compilation does not show."
