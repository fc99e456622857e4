//! Code of others that panics where a file is damaged: its panic becomes an error, and nothing is printed.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Whether a panic of this thread will be caught here.
    static IS_GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// What `call` gives, or the message of its panic. Whatever it has changed by then is not to be used again.
pub(super) fn guarded<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |panic| {
            if !IS_GUARDED.get() {
                before(panic);
            }
        }));
    });
    let outer = IS_GUARDED.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(call));
    IS_GUARDED.set(outer);
    outcome.map_err(|panic| message(&*panic))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("it gave up without a reason").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_its_message() {
        assert_eq!(guarded(|| 7), Ok(7));
        assert_eq!(guarded(|| panic!("no {}", "token")), Err::<(), _>("no token".to_owned()));
        assert_eq!(guarded(|| guarded(|| panic!("inner")).and(Ok(()))), Ok(Err("inner".to_owned())));
        assert!(!IS_GUARDED.get());
    }
}
