//! Tokens of the web view.

use std::io;

use rustix::rand::{GetRandomFlags, getrandom};

/// Browsers that may be open at once; the oldest loses its session.
const MOST_SESSIONS: usize = 32;

/// The URL's token, the bearer token of `/metrics`, and the sessions of browsers.
pub(super) struct Secrets {
    token: String,
    bearer: String,
    sessions: Vec<String>,
}

impl Secrets {
    pub(super) fn draw() -> io::Result<Self> {
        Ok(Self { token: random()?, bearer: random()?, sessions: Vec::new() })
    }

    pub(super) fn token(&self) -> &str {
        &self.token
    }

    pub(super) fn bearer(&self) -> &str {
        &self.bearer
    }

    /// Exchanges the URL's token for a session, once: the next URL has another token.
    pub(super) fn exchange(&mut self, token: &str) -> io::Result<Option<String>> {
        if !equal(token, &self.token) {
            return Ok(None);
        }
        let session = random()?;
        self.token = random()?;
        if self.sessions.len() == MOST_SESSIONS {
            self.sessions.remove(0);
        }
        self.sessions.push(session.clone());
        Ok(Some(session))
    }

    pub(super) fn is_session(&self, cookie: &str) -> bool {
        self.sessions.iter().fold(false, |found, session| found | equal(cookie, session))
    }

    pub(super) fn is_bearer(&self, bearer: &str) -> bool {
        equal(bearer, &self.bearer)
    }
}

/// 128 random bits as hexadecimal digits.
fn random() -> io::Result<String> {
    let mut bytes = [0_u8; 16];
    // 16 bytes are never short.
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(format!("{:032x}", u128::from_le_bytes(bytes)))
}

/// Takes the same time wherever texts of equal length differ.
fn equal(one: &str, other: &str) -> bool {
    let differs = one.bytes().zip(other.bytes()).fold(0, |differs, (a, b)| differs | (a ^ b));
    one.len() == other.len() && differs == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_exchanged_once() {
        let mut secrets = Secrets::draw().unwrap();
        let token = secrets.token().to_owned();
        assert_eq!(token.len(), 32);
        assert_eq!(secrets.exchange("").unwrap(), None);
        assert_eq!(secrets.exchange(&token[..31]).unwrap(), None);
        let session = secrets.exchange(&token).unwrap().unwrap();
        assert_eq!(secrets.exchange(&token).unwrap(), None, "used");
        assert!(secrets.is_session(&session) && !secrets.is_session(&token) && !secrets.is_session(""));
        assert!(!secrets.is_bearer(&session) && secrets.is_bearer(secrets.bearer()));
        for _ in 0..MOST_SESSIONS {
            let next = secrets.token().to_owned();
            secrets.exchange(&next).unwrap().unwrap();
        }
        assert!(!secrets.is_session(&session), "the oldest of too many");
    }
}
