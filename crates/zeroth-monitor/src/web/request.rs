//! Reads the head of a request, with bounds on everything. Requests have no body here.

use std::io::Read;
use std::time::{Duration, Instant};

/// Bytes of a head.
const LONGEST_HEAD: usize = 16 << 10;
/// Headers of a request.
const MOST_HEADERS: usize = 64;

/// Why there is no request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Problem {
    /// Nothing more came.
    Closed,
    /// It is not a request.
    Invalid,
    /// Its head is too long.
    TooLong,
}

impl Problem {
    pub(super) fn status(self) -> u16 {
        if self == Self::TooLong { 431 } else { 400 }
    }

    pub(super) fn reason(self) -> &'static str {
        if self == Self::TooLong { "the request is too long" } else { "this is not a request" }
    }
}

/// The head of a request.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) method: String,
    /// Without the query; not decoded, as no name here needs it.
    pub(super) path: String,
    query: String,
    /// Names in lower case.
    headers: Vec<(String, String)>,
}

/// Reads a request, for at most `patience`.
pub(super) fn read(stream: &mut impl Read, patience: Duration) -> Result<Request, Problem> {
    let begun = Instant::now();
    let mut bytes = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        let count = stream.read(&mut chunk).map_err(|_| Problem::Closed)?;
        if count == 0 || begun.elapsed() > patience {
            return Err(Problem::Closed);
        }
        bytes.extend_from_slice(&chunk[..count]);
        if let Some(request) = parse(&bytes)? {
            return Ok(request);
        }
        if bytes.len() > LONGEST_HEAD {
            return Err(Problem::TooLong);
        }
    }
}

/// Parses a head; `None` where more must come.
pub(super) fn parse(bytes: &[u8]) -> Result<Option<Request>, Problem> {
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut parsed = httparse::Request::new(&mut headers);
    match parsed.parse(bytes) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => return Err(Problem::TooLong),
        Err(_) => return Err(Problem::Invalid),
    }
    let (method, target) = parsed.method.zip(parsed.path).ok_or(Problem::Invalid)?;
    // No absolute URLs: this is not a proxy.
    if !target.starts_with('/') {
        return Err(Problem::Invalid);
    }
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let text = |header: &httparse::Header<'_>| {
        let value = str::from_utf8(header.value).map_err(|_| Problem::Invalid)?;
        Ok((header.name.to_ascii_lowercase(), value.trim().to_owned()))
    };
    Ok(Some(Request {
        method: method.to_owned(),
        path: path.to_owned(),
        query: query.to_owned(),
        headers: parsed.headers.iter().map(text).collect::<Result<_, _>>()?,
    }))
}

impl Request {
    /// A header that is there once.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let mut found = self.headers.iter().filter(|(known, _)| known == name);
        let first = found.next().map(|(_, value)| value.as_str());
        first.filter(|_| found.next().is_none())
    }

    /// A parameter of the query.
    pub(super) fn query(&self, name: &str) -> Option<&str> {
        self.query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
    }

    /// A cookie.
    pub(super) fn cookie(&self, name: &str) -> Option<&str> {
        self.header("cookie")?.split(';').find_map(|pair| pair.trim().strip_prefix(name)?.strip_prefix('='))
    }

    /// Whether the Host is loopback, with any port: a tunnel may have another. Names of other machines are those of a
    /// page that has rebound its name to this address.
    pub(super) fn has_own_host(&self) -> bool {
        let Some(host) = self.header("host") else { return false };
        let name = match host.rsplit_once(':') {
            Some((name, port)) if !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => host,
        };
        ["127.0.0.1", "localhost", "[::1]"].iter().any(|own| name.eq_ignore_ascii_case(own))
    }

    /// Whether a browser says that another site made it.
    pub(super) fn is_cross_site(&self) -> bool {
        let others = self.headers.iter().filter(|(name, _)| name == "sec-fetch-site");
        others.into_iter().any(|(_, site)| site != "same-origin" && site != "none")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(text: &str) -> Request {
        parse(text.as_bytes()).unwrap().unwrap()
    }

    #[test]
    fn a_request_has_path_query_headers_and_cookies() {
        let request = request(
            "GET /api/x?run=1&name=a HTTP/1.1\r\nHost: localhost:80\r\nCookie: a=1; zeroth_80=secret\r\n\r\n",
        );
        assert_eq!((request.method.as_str(), request.path.as_str()), ("GET", "/api/x"));
        assert_eq!(
            (request.query("run"), request.query("name"), request.query("nam")),
            (Some("1"), Some("a"), None)
        );
        assert_eq!((request.cookie("zeroth_80"), request.cookie("zeroth_8")), (Some("secret"), None));
        assert!(request.has_own_host() && !request.is_cross_site());
    }

    #[test]
    fn only_loopback_is_an_own_host() {
        let host = |host: &str| request(&format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n")).has_own_host();
        for own in ["127.0.0.1", "127.0.0.1:8080", "LOCALHOST:1", "[::1]:80"] {
            assert!(host(own), "{own}");
        }
        for other in
            ["", "example.com", "127.0.0.1.example.com:80", "localhost.:80", "127.0.0.1:x", "0.0.0.0"]
        {
            assert!(!host(other), "{other}");
        }
        assert!(!request("GET / HTTP/1.1\r\n\r\n").has_own_host());
        assert!(
            !request("GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n").has_own_host(),
            "twice"
        );
    }

    #[test]
    fn what_is_no_request_is_refused_and_bounds_hold() {
        for text in [
            "\0\0\r\n\r\n",
            "GET http://a/ HTTP/1.1\r\n\r\n",
            "GET / HTTP/9.9\r\n\r\n",
            "GET * HTTP/1.1\r\n\r\n",
        ] {
            assert_eq!(parse(text.as_bytes()).unwrap_err(), Problem::Invalid, "{text:?}");
        }
        assert!(parse(b"GET / HTT").unwrap().is_none());
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(100));
        assert_eq!(parse(many.as_bytes()).unwrap_err(), Problem::TooLong);
        let long = format!("GET /{} HTTP/1.1\r\n", "x".repeat(40_000));
        assert_eq!(read(&mut long.as_bytes(), Duration::from_secs(9)).unwrap_err(), Problem::TooLong);
        assert_eq!(read(&mut &b"GET / HT"[..], Duration::from_secs(9)).unwrap_err(), Problem::Closed);
    }
}
