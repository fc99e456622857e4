//! The states that checkpoints hold, by name.

use zeroth_engine::State;

/// The states that are saved, in the order that a rank writes them. Gradients are not: a checkpoint lies between steps.
pub const SAVED: [State; 3] = [State::Weights, State::First, State::Second];

/// What a state is called in files; `None` for one that is not saved.
pub const fn state_name(state: State) -> Option<&'static str> {
    match state {
        State::Weights => Some("weights"),
        State::First => Some("first"),
        State::Second => Some("second"),
        State::Gradient => None,
    }
}

/// The state of that name.
pub fn state_named(name: &str) -> Option<State> {
    SAVED.into_iter().find(|state| state_name(*state) == Some(name))
}

/// The name of a tensor: `weights/model.norm.weight@0`.
pub(super) fn tensor_name(state: &str, parameter: &str, first: u64) -> String {
    format!("{state}/{parameter}@{first}")
}

/// A tensor's name taken apart again.
pub(super) fn parse_tensor_name(name: &str) -> Option<(State, &str, u64)> {
    let (state, rest) = name.split_once('/')?;
    let (parameter, first) = rest.rsplit_once('@')?;
    Some((state_named(state)?, parameter, first.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_tensors_are_taken_apart_as_they_were_put_together() {
        let name = tensor_name("first", "odd/name@7.weight", 1_048_576);
        assert_eq!(name, "first/odd/name@7.weight@1048576");
        assert_eq!(parse_tensor_name(&name), Some((State::First, "odd/name@7.weight", 1_048_576)));
        for wrong in ["weights", "weights/x", "third/x@0", "weights/x@-1", "weights/x@"] {
            assert_eq!(parse_tensor_name(wrong), None, "{wrong}");
        }
    }
}
