//! Errors in the definition of a model's forward.

/// A forward whose ops do not fit together, found while it is built.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what their fields are")]
pub enum GraphError {
    /// Incompatible shapes.
    #[error("{op} in unit `{unit}`: {what} should be {expected}, and is {found}")]
    Shape {
        op: &'static str,
        unit: String,
        /// The operand or dimension.
        what: String,
        expected: String,
        found: String,
    },
    /// An op outside any unit.
    #[error("{op} was called before a unit was begun: call `unit` first")]
    NoUnit { op: &'static str },
    /// A parameter name that no unit declares.
    #[error("no unit declares a parameter `{name}`")]
    NoParam { name: String },
    /// A parameter name declared twice.
    #[error(
        "the parameter `{name}` is declared in unit `{first}` and again in `{second}`: a parameter that several \
             units use is a unit of its own"
    )]
    ParamTwice {
        name: String,
        /// The unit that declared it first.
        first: String,
        /// The unit that declared it again.
        second: String,
    },
    /// A part of the loss with two weights.
    #[error(
        "the loss part `{name}` has weight {first}, and {second} in unit `{unit}`: a part has one weight"
    )]
    LossWeights {
        name: &'static str,
        first: f64,
        second: f64,
        /// The unit of the loss with the other one.
        unit: String,
    },
    /// A weight that is infinite or NaN.
    #[error("the loss part `{name}` in unit `{unit}` has weight {weight}: it must be finite")]
    LossWeight {
        name: &'static str,
        weight: f64,
        /// The unit of the loss.
        unit: String,
    },
    /// A parameter of a teacher that is trained, or a teacher's head.
    #[error("the parameter `{name}` of the teacher is trained: a teacher's parameters are frozen")]
    TrainedTeacher { name: String },
    /// A graph without a loss has no gradients.
    #[error("the forward has no loss, so there is nothing to take a gradient of")]
    NoLoss,
    /// A rope without a rotary embedding.
    #[error("{op} in unit `{unit}` has no rotary embedding: call `rotary` first")]
    NoRotary { op: &'static str, unit: String },
    /// An op none of whose outputs reaches the loss.
    #[error("{op} in unit `{unit}` leads nowhere: none of its outputs reaches the loss")]
    DeadEnd { op: &'static str, unit: String },
}
