//! Errors in the definition of a model's forward.

/// A forward whose ops do not fit together, found while it is built.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what their fields are")]
pub enum GraphError {
    #[error("{op} in unit `{unit}`: {what} should be {expected}, and is {found}")]
    Shape { op: &'static str, unit: String, what: String, expected: String, found: String },
    #[error("{op} was called before a unit was begun: call `unit` first")]
    NoUnit { op: &'static str },
    #[error("no unit declares a parameter `{name}`")]
    NoParam { name: String },
    #[error(
        "the parameter `{name}` is declared in unit `{first}` and again in `{second}`: a parameter that several \
             units use is a unit of its own"
    )]
    ParamTwice { name: String, first: String, second: String },
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
    #[error("the loss part `{name}` in unit `{unit}` has weight {weight}: it must be finite")]
    LossWeight { name: &'static str, weight: f64, unit: String },
    #[error("the parameter `{name}` of the teacher is trained: a teacher's parameters are frozen")]
    TrainedTeacher { name: String },
    #[error("the forward has no loss, so there is nothing to take a gradient of")]
    NoLoss,
    #[error("{op} in unit `{unit}` has no rotary embedding: call `rotary` first")]
    NoRotary { op: &'static str, unit: String },
    #[error("{op} in unit `{unit}` leads nowhere: none of its outputs reaches the loss")]
    DeadEnd { op: &'static str, unit: String },
}
