//! The page: one document, its script and style allowed by their hashes.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};

use super::response::Response;

const STYLE: &str = include_str!("page.css");
const SCRIPTS: [&str; 3] = [include_str!("chart.js"), include_str!("timeline.js"), include_str!("page.js")];
const DOCUMENT: &str = include_str!("page.html");

pub(super) struct Page {
    document: String,
    policy: String,
}

impl Page {
    pub(super) fn new() -> Self {
        let script = SCRIPTS.concat();
        let document = DOCUMENT.replace("/* STYLE */", STYLE).replace("/* SCRIPT */", &script);
        let policy = format!(
            "default-src 'none'; script-src '{}'; style-src '{}'; connect-src 'self'; img-src data:; \
             frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
            hash(&script),
            hash(STYLE)
        );
        Self { document, policy }
    }

    pub(super) fn response(&self) -> Response {
        Response::text("text/html; charset=utf-8", self.document.as_str())
            .with("Content-Security-Policy", &self.policy)
    }

    /// What a browser with a valid token gets: it goes to the page itself, as a redirect from another site's link would
    /// come without the cookie.
    pub(super) fn entrance() -> Response {
        let text = "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta http-equiv=\"refresh\" content=\"0;url=/\">\
                    <title>zeroth monitor</title><a href=\"/\">continue</a></html>";
        Response::text("text/html; charset=utf-8", text)
    }
}

fn hash(text: &str) -> String {
    format!("sha256-{}", STANDARD.encode(Sha256::digest(text.as_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_one_document_without_inline_handlers_or_other_hosts() {
        let page = Page::new();
        assert!(!page.document.contains("/* STYLE */") && !page.document.contains("/* SCRIPT */"));
        assert!(!page.policy.contains("unsafe") && page.policy.matches("sha256-").count() == 2);
        for forbidden in [
            "http://",
            "https://",
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "eval(",
            " onclick=",
            " style=\"",
        ] {
            // The name of SVG's namespace is not an address that is loaded.
            let document = page.document.replace("http://www.w3.org/2000/svg", "");
            assert!(!document.contains(forbidden), "{forbidden}");
        }
    }
}
