//! Responses, all with the headers that keep a page to itself.

use std::io::{self, Write};

use serde::Serialize;

/// A response; the connection is closed after it.
pub(super) struct Response {
    status: u16,
    kind: &'static str,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

impl Response {
    pub(super) fn text(kind: &'static str, body: impl Into<Vec<u8>>) -> Self {
        Self { status: 200, kind, headers: Vec::new(), body: body.into() }
    }

    pub(super) fn json(value: &impl Serialize) -> Self {
        Self::text("application/json", serde_json::to_vec(value).unwrap_or_default())
    }

    pub(super) fn problem(status: u16, reason: &str) -> Self {
        Self { status, ..Self::text("text/plain; charset=utf-8", format!("{reason}\n")) }
    }

    pub(super) fn event_stream() -> Self {
        Self::text("text/event-stream", "")
    }

    /// Adds a header; its value is ours, never a client's.
    pub(super) fn with(mut self, name: &'static str, value: &str) -> Self {
        self.headers.push((name, value.to_owned()));
        self
    }

    fn head(&self, length: Option<usize>) -> String {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            403 => "Forbidden",
            404 => "Not Found",
            405 => "Method Not Allowed",
            421 => "Misdirected Request",
            422 => "Unprocessable Content",
            503 => "Service Unavailable",
            431 => "Request Header Fields Too Large",
            _ => "Internal Server Error",
        };
        let mut head = format!("HTTP/1.1 {} {reason}\r\nContent-Type: {}\r\n", self.status, self.kind);
        if let Some(length) = length {
            head.push_str(&format!("Content-Length: {length}\r\n"));
        }
        let policy = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'";
        let has_policy = self.headers.iter().any(|(name, _)| *name == "Content-Security-Policy");
        let common = [
            ("Connection", "close"),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Cross-Origin-Opener-Policy", "same-origin"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Permissions-Policy", "camera=(), geolocation=(), microphone=()"),
        ];
        let own = self.headers.iter().map(|(name, value)| (*name, value.as_str()));
        let policy = (!has_policy).then_some(("Content-Security-Policy", policy));
        for (name, value) in common.into_iter().chain(policy).chain(own) {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head + "\r\n"
    }

    /// Writes head and body.
    pub(super) fn write(&self, stream: &mut impl Write) -> io::Result<()> {
        let mut all = self.head(Some(self.body.len())).into_bytes();
        all.extend_from_slice(&self.body);
        stream.write_all(&all)
    }

    /// Writes the head of a body without a known length.
    pub(super) fn write_head(&self, stream: &mut impl Write) -> io::Result<()> {
        stream.write_all(self.head(None).as_bytes())
    }
}
