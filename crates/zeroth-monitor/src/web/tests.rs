//! The server without and with a socket.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;

use super::*;

/// A run with a hostile name, and a secret beside it.
fn runs(folder: &Path) -> Vec<Run> {
    let run = folder.join("<img src=x onerror=alert(1)>");
    fs::create_dir_all(run.join("logs")).unwrap();
    fs::write(
        run.join("metrics.jsonl"),
        "{\"step\":1,\"loss\":2.5,\"lr\":0.1}\n{\"step\":2,\"loss\":2.25,\"lr\":0.1}\n",
    )
    .unwrap();
    fs::write(run.join("logs/step-2.trace.json"), "{\"traceEvents\": []}").unwrap();
    fs::write(folder.join("secret.json"), "{\"traceEvents\": []}").unwrap();
    vec![Run::open(&run).unwrap()]
}

fn server(folder: &Path) -> WebServer {
    WebServer::bind(runs(folder), 0, |_| {}).unwrap()
}

/// The response to a request, without a socket.
fn ask(server: &WebServer, request: &str) -> String {
    let response = match request::parse(request.as_bytes()) {
        Ok(Some(request)) => server.shared.answer(&request),
        Ok(None) => return String::new(),
        Err(problem) => Response::problem(problem.status(), problem.reason()),
    };
    let mut bytes = Vec::new();
    response.write(&mut bytes).unwrap();
    String::from_utf8(bytes).unwrap()
}

fn get(server: &WebServer, path: &str, headers: &str) -> String {
    ask(server, &format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{}\r\n{headers}\r\n", server.shared.port))
}

fn status(response: &str) -> u16 {
    response.split(' ').nth(1).unwrap().parse().unwrap()
}

/// The cookie header of a browser that has opened the URL.
fn cookie(server: &WebServer) -> String {
    let url = server.url();
    let opened =
        get(server, &format!("/{}", url.split_once("/?").map(|(_, query)| format!("?{query}")).unwrap()), "");
    assert_eq!(status(&opened), 200, "{opened}");
    let set = opened.lines().find_map(|line| line.strip_prefix("Set-Cookie: ")).unwrap();
    assert!(set.contains("; HttpOnly") && set.contains("; SameSite=Strict"), "{set}");
    format!("Cookie: {}\r\n", set.split(';').next().unwrap())
}

#[test]
fn nothing_is_shown_without_a_cookie_and_a_token_opens_once() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path());
    for path in [
        "/",
        "/api/snapshot",
        "/api/stream",
        "/api/config?run=0",
        "/metrics",
        "/nothing",
        "/?token=",
        "/?token=0",
    ] {
        assert_eq!(status(&get(&server, path, "")), 403, "{path}");
    }
    let url = server.url();
    let cookie = cookie(&server);
    assert_ne!(server.url(), url, "the next browser gets another token");
    let used = format!("/?{}", url.split_once("/?").unwrap().1);
    assert_eq!(status(&get(&server, &used, "")), 403);
    assert_eq!(status(&get(&server, &used, &cookie)), 403, "a used token is not forgiven");
    assert_eq!(status(&get(&server, "/", &cookie)), 200);
    let wrong = cookie.replace("zeroth_", "zeroth");
    assert_eq!(status(&get(&server, "/", &wrong)), 403);
    let bearer = format!("Authorization: Bearer {}\r\n", server.bearer());
    assert_eq!(status(&get(&server, "/metrics", &cookie)), 403, "a page has no use for it");
    assert_eq!(status(&get(&server, "/api/snapshot", &bearer)), 403);
    let metrics = get(&server, "/metrics", &bearer);
    assert!(metrics.contains("zeroth_loss{run=\"<img src=x onerror=alert(1)>\""), "{metrics}");
}

#[test]
fn other_hosts_methods_and_sites_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path());
    let cookie = cookie(&server);
    for host in ["example.com", "169.254.169.254", "127.0.0.1.evil.example"] {
        let refused = ask(&server, &format!("GET / HTTP/1.1\r\nHost: {host}\r\n{cookie}\r\n"));
        assert_eq!(status(&refused), 421, "{host}");
        let token = server.url().split_once("/?").unwrap().1.to_owned();
        let refused = ask(&server, &format!("GET /?{token} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        assert_eq!(status(&refused), 421, "{host} with a token");
    }
    for method in ["POST", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"] {
        let refused = ask(&server, &format!("{method} / HTTP/1.1\r\nHost: localhost\r\n{cookie}\r\n"));
        assert_eq!(status(&refused), 405, "{method}");
        assert!(refused.contains("\r\nAllow: GET\r\n"));
    }
    assert_eq!(status(&get(&server, "/", &format!("{cookie}Sec-Fetch-Site: cross-site\r\n"))), 403);
    assert_eq!(status(&get(&server, "/", &format!("{cookie}Sec-Fetch-Site: same-origin\r\n"))), 200);
}

#[test]
fn the_page_allows_its_own_script_alone_and_every_response_keeps_to_itself() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path());
    let cookie = cookie(&server);
    let page = get(&server, "/", &cookie);
    let policy = page.lines().find_map(|line| line.strip_prefix("Content-Security-Policy: ")).unwrap();
    assert!(
        policy.starts_with("default-src 'none'; script-src 'sha256-") && !policy.contains("unsafe"),
        "{policy}"
    );
    assert!(!page.contains("onerror=alert"), "names of runs are not in the document");
    for path in ["/", "/api/snapshot", "/nothing", "/metrics"] {
        let response = get(&server, path, &cookie);
        for header in [
            "Referrer-Policy: no-referrer",
            "X-Content-Type-Options: nosniff",
            "Cache-Control: no-store",
            "Content-Security-Policy: default-src 'none'",
        ] {
            assert!(response.contains(header), "{path} has no {header}");
        }
    }
    let snapshot = get(&server, "/api/snapshot", &cookie);
    assert!(
        snapshot.contains("Content-Type: application/json") && snapshot.contains("\"loss\""),
        "{snapshot}"
    );
}

#[test]
fn paths_of_a_request_reach_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path());
    let cookie = cookie(&server);
    assert_eq!(status(&get(&server, "/api/timeline?run=0&name=step-2.trace.json", &cookie)), 200);
    for query in [
        "run=0&name=../../secret.json",
        "run=0&name=..%2f..%2fsecret.json",
        "run=0&name=/etc/passwd",
        "run=0&name=",
        "run=1&name=step-2.trace.json",
        "run=-1&name=step-2.trace.json",
        "name=step-2.trace.json",
    ] {
        assert_eq!(status(&get(&server, &format!("/api/timeline?{query}"), &cookie)), 404, "{query}");
    }
    for path in ["/../secret.json", "/logs/../../secret.json", "/%2e%2e/secret.json", "//secret.json"] {
        assert_eq!(status(&get(&server, path, &cookie)), 404, "{path}");
    }
    // A link under a listed name is followed only to a trace.
    let run = folder.path().join("<img src=x onerror=alert(1)>");
    fs::remove_file(run.join("logs/step-2.trace.json")).unwrap();
    fs::create_dir(run.join("logs/step-2.trace.json")).unwrap();
    assert_eq!(status(&get(&server, "/api/timeline?run=0&name=step-2.trace.json", &cookie)), 422);
}

#[test]
fn ten_thousand_random_requests_are_survived() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path());
    let parts = [
        "GET ",
        "POST ",
        "/",
        "/?token=",
        "/metrics",
        "/api/stream",
        "/api/timeline?run=",
        "&name=",
        "../",
        "%00",
        " HTTP/1.1",
        "\r\n",
        "\r\n\r\n",
        "Host: ",
        "localhost",
        ":",
        "Cookie: ",
        "zeroth_1=",
        ";",
        "Authorization: Bearer ",
        "\0",
        "é",
        "0",
        "9999999999999999999999",
        "Sec-Fetch-Site: ",
        "\u{202e}",
        "A: b\r\n",
    ];
    // A linear congruential generator: the same requests every time.
    let mut seed = 42_u64;
    let mut next = |most: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % most
    };
    let mut answered = 0;
    for _ in 0..10_000 {
        let mut request = if next(2) == 0 { "GET ".to_owned() } else { String::new() };
        for _ in 0..next(24) {
            request.push_str(parts[next(parts.len())]);
        }
        if next(2) == 0 {
            request.push_str(" HTTP/1.1\r\nHost: localhost\r\n\r\n");
        }
        answered += usize::from(!ask(&server, &request).is_empty());
    }
    assert!(answered > 1000, "{answered}");
}

#[test]
fn a_browser_is_streamed_to_and_a_taken_port_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let server = Arc::new(server(folder.path()));
    let port = server.shared.port;
    let error = WebServer::bind(Vec::new(), port, |_| {}).err().unwrap().to_string();
    assert!(error.contains(&format!("127.0.0.1:{port}")) && error.contains("--port"), "{error}");
    let cookie = cookie(&server);
    let stop = Arc::new(AtomicBool::new(false));
    let (background, stops) = (Arc::clone(&server), Arc::clone(&stop));
    let thread = std::thread::spawn(move || background.run(&stops));
    let open = |request: &str| {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        stream
    };
    let mut stream = open(&format!("GET /api/stream HTTP/1.1\r\nHost: localhost\r\n{cookie}\r\n"));
    let mut heard = String::new();
    let mut until = |wanted: &str| {
        let mut chunk = [0; 4096];
        while !heard.contains(wanted) {
            let count = stream.read(&mut chunk).unwrap();
            assert!(count > 0, "closed before {wanted}: {heard}");
            heard.push_str(&String::from_utf8_lossy(&chunk[..count]));
        }
    };
    until("\"whole\":true");
    let metrics = folder.path().join("<img src=x onerror=alert(1)>/metrics.jsonl");
    let mut file = fs::OpenOptions::new().append(true).open(metrics).unwrap();
    file.write_all(b"{\"step\":3,\"loss\":1.125,\"lr\":0.1}\n").unwrap();
    until("[[3,1.125]]");
    for garbage in [
        "\0\0\0\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello",
    ] {
        let mut response = String::new();
        open(garbage).read_to_string(&mut response).unwrap();
        assert!((400..500).contains(&status(&response)), "{garbage:?}: {response}");
    }
    stop.store(true, Ordering::Relaxed);
    thread.join().unwrap().unwrap();
}

#[test]
fn strangers_do_not_keep_a_browser_out() {
    let folder = tempfile::tempdir().unwrap();
    let server = Arc::new(server(folder.path()));
    let port = server.shared.port;
    let cookie = cookie(&server);
    let stop = Arc::new(AtomicBool::new(false));
    let (background, stops) = (Arc::clone(&server), Arc::clone(&stop));
    let thread = std::thread::spawn(move || background.run(&stops));
    let open = |request: &str| {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        // One that was driven out already.
        let _ = stream.write_all(request.as_bytes());
        stream
    };
    let read = |stream: &mut TcpStream| {
        let mut chunk = [0; 4096];
        let count = stream.read(&mut chunk).unwrap_or(0);
        String::from_utf8_lossy(&chunk[..count]).into_owned()
    };
    let request = format!("GET /api/stream HTTP/1.1\r\nHost: localhost\r\n{cookie}\r\n");
    let mut page = open(&request);
    assert_eq!(status(&read(&mut page)), 200);
    // More than are held, silent or with a head that never ends.
    let strangers: Vec<TcpStream> =
        (0..200).map(|at| open(if at % 2 == 0 { "" } else { "GET / HT" })).collect();
    let mut second = open(&request);
    assert_eq!(status(&read(&mut second)), 200, "a browser gets in");
    let token = server.url().split_once("/?").unwrap().1.to_owned();
    let mut third = open(&format!("GET /?{token} HTTP/1.1\r\nHost: localhost\r\n\r\n"));
    assert_eq!(status(&read(&mut third)), 200, "and so does one with a token");
    // Pages that were open are still told.
    let metrics = folder.path().join("<img src=x onerror=alert(1)>/metrics.jsonl");
    let mut file = fs::OpenOptions::new().append(true).open(metrics).unwrap();
    file.write_all(b"{\"step\":3,\"loss\":1.125,\"lr\":0.1}\n").unwrap();
    for page in [&mut page, &mut second] {
        let mut heard = String::new();
        while !heard.contains("[[3,1.125]]") {
            let more = read(page);
            assert!(!more.is_empty(), "a page was driven out: {heard}");
            heard += &more;
        }
    }
    drop(strangers);
    stop.store(true, Ordering::Relaxed);
    thread.join().unwrap().unwrap();
}
