//! Names of the states in checkpoints.

use zeroth_engine::StateKind;
use zeroth_kernel::Moment;

/// The saved states, in the order a rank writes them. Gradients are not saved: a checkpoint is taken between steps.
pub const SAVED_STATES: [StateKind; 4] = [
    StateKind::Weights,
    StateKind::Moment(Moment::First),
    StateKind::Moment(Moment::Second),
    StateKind::Moment(Moment::Third),
];

/// A state's name in files; `None` for one that is not saved.
pub const fn state_name(state: StateKind) -> Option<&'static str> {
    match state {
        StateKind::Weights => Some("weights"),
        StateKind::Moment(moment) => Some(moment.name()),
        StateKind::Gradient => None,
    }
}

/// The state with a given name.
pub fn state_from_name(name: &str) -> Option<StateKind> {
    SAVED_STATES.into_iter().find(|state| state_name(*state) == Some(name))
}

/// The name of a tensor: `weights/model.norm.weight@0`.
pub(super) fn tensor_name(state: &str, parameter: &str, first: u64) -> String {
    format!("{state}/{parameter}@{first}")
}

/// Splits a tensor's name into state, parameter and first element.
pub(super) fn parse_tensor_name(name: &str) -> Option<(StateKind, &str, u64)> {
    let (state, rest) = name.split_once('/')?;
    let (parameter, first) = rest.rsplit_once('@')?;
    Some((state_from_name(state)?, parameter, first.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensor_names_round_trip() {
        let name = tensor_name("first", "odd/name@7.weight", 1_048_576);
        assert_eq!(name, "first/odd/name@7.weight@1048576");
        assert_eq!(
            parse_tensor_name(&name),
            Some((StateKind::Moment(Moment::First), "odd/name@7.weight", 1_048_576))
        );
        for wrong in ["weights", "weights/x", "fourth/x@0", "weights/x@-1", "weights/x@"] {
            assert_eq!(parse_tensor_name(wrong), None, "{wrong}");
        }
    }
}
