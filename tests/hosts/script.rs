//! The script `hosts` itself.

use crate::namespaces::Hosts;

#[test]
fn hosts_have_names_links_and_processes_of_their_own_and_are_removed_by_name() {
    let Some(hosts) = Hosts::up(2, &[]) else { return };
    let said = |host: usize, line: &str| {
        let ended = hosts.shell(host, line);
        String::from_utf8(ended.stdout).unwrap().trim().to_owned()
    };
    assert_eq!([1, 2].map(|host| said(host, "hostname")), [1, 2].map(|host| hosts.host_name(host)));
    assert_eq!(said(1, "echo /sys/class/net/*"), "/sys/class/net/eth0 /sys/class/net/lo");
    let processes = said(2, "echo /proc/[0-9]*");
    assert!(processes.contains("/proc/1 ") && processes.split(' ').count() < 10, "{processes}");
    assert_ne!(said(1, "echo $TMPDIR"), said(2, "echo $TMPDIR"));

    let receive = "exec 3<>/dev/tcp/$0/7777 && cat <&3 | wc -c";
    let send = "import socket; s = socket.create_server(('', 7777)); print(flush=True); s.accept()[0].sendall(bytes(10**6))";
    let arrives = |host: &str| {
        let mut server = hosts.command("exec", &["2", "python3", "-c", send]);
        let mut server = server.stdout(std::process::Stdio::piped()).spawn().unwrap();
        // Its first line says that it listens.
        std::io::BufRead::read_line(
            &mut std::io::BufReader::new(server.stdout.as_mut().unwrap()),
            &mut String::new(),
        )
        .unwrap();
        let got =
            hosts.command("exec", &["1", "timeout", "2", "bash", "-c", receive, host]).output().unwrap();
        hosts.shell(2, "kill -9 $(pgrep python3)");
        server.wait().unwrap();
        String::from_utf8(got.stdout).unwrap().trim() == "1000000"
    };
    let [before, _] = hosts.bytes(1);
    assert!(arrives(&hosts.host_name(2)));
    let came = hosts.bytes(1)[0] - before;
    assert!((1_000_000..1_100_000).contains(&came), "{came} bytes for 1,000,000");
    hosts.set_link(2, false);
    assert!(!arrives(&hosts.host_name(2)), "a cable that is pulled carries nothing");

    let namespace = format!("/run/netns/{}", hosts.host_name(1));
    assert!(std::path::Path::new(&namespace).exists());
    drop(hosts);
    assert!(!std::path::Path::new(&namespace).exists());
}
