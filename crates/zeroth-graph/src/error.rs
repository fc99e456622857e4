//! What can be wrong with a model's forward as it is written down.

/// A forward that does not fit together. It is a mistake of the model's author, found before anything runs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GraphError {
    /// Shapes that do not go together.
    #[error("{op} in unit `{unit}`: {what} should be {expected}, and is {found}")]
    Shape {
        /// The op.
        op: &'static str,
        /// The unit it was called in.
        unit: String,
        /// Which operand, or which of its sizes.
        what: String,
        /// What would do.
        expected: String,
        /// What was given.
        found: String,
    },
    /// An op outside of any unit.
    #[error("{op} was called before a unit was begun: call `unit` first")]
    NoUnit {
        /// The op.
        op: &'static str,
    },
    /// A parameter name that no unit declares.
    #[error("no unit declares a parameter `{name}`")]
    NoParam {
        /// The name.
        name: String,
    },
    /// A parameter name declared twice.
    #[error(
        "the parameter `{name}` is declared in unit `{first}` and again in `{second}`: a parameter that several \
             units use is a unit of its own"
    )]
    ParamTwice {
        /// The name.
        name: String,
        /// The unit that declared it first.
        first: String,
        /// The unit that declared it again.
        second: String,
    },
    /// A graph without a loss has no gradients.
    #[error("the forward has no head_loss, so there is nothing to take a gradient of")]
    NoLoss,
    /// Two losses.
    #[error("the forward has two losses; a micro-batch has one")]
    TwoLosses,
    /// A value whose gradient would be lost: it is used, but nothing that is used leads to the loss.
    #[error("{op} in unit `{unit}` leads nowhere: none of its outputs reaches the loss")]
    DeadEnd {
        /// The op.
        op: &'static str,
        /// Its unit.
        unit: String,
    },
}
