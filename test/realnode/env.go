package realnode

import (
	"fmt"
	"os"
	"strings"
)

// Env returns the environment for commands that work against the node, as
// NAME=VALUE, without PATH.
func (n *Node) Env() []string {
	p := n.paths
	images := p.imageSocket()
	if n.state.WithoutOcihold {
		images = p.crioSocket()
	}
	env := []string{
		"CONTAINER_RUNTIME_ENDPOINT=unix://" + p.crioSocket(),
		"IMAGE_SERVICE_ENDPOINT=unix://" + images,
		"CRI_CONFIG_FILE=" + p.crictlConf(),
		"OCIHOLD_CONFIG=" + p.ociholdConf(),
		"REGISTRY=" + n.Registry(),
		"BASE_IMAGE=" + n.BaseImage(),
		"NODE_DIR=" + p.dir,
		"CRIO_ROOT=" + p.crioRoot(),
		"CRIO_RUNROOT=" + p.crioRunRoot(),
		"CGROUP_PARENT=" + p.cgroupParent() + "/pods",
		"CONTAINERS_REGISTRIES_CONF=" + p.registriesConf(),
		"CONTAINERS_STORAGE_CONF=" + p.storageConf(),
	}
	if n.state.Auth != "" {
		env = append(env, "REGISTRY_AUTH_FILE="+p.authFile())
	}
	if n.state.TLS {
		env = append(env, "SSL_CERT_FILE="+p.cert())
	}
	return env
}

// Path is the PATH for commands that work against the node.
func (n *Node) Path() string { return n.paths.in("bin") + ":" + os.Getenv("PATH") }

// EnvFile is the file of export lines that a shell can source.
func (n *Node) EnvFile() string { return n.paths.env() }

func (n *Node) envFile() string {
	var b strings.Builder
	for _, e := range n.Env() {
		name, value, _ := strings.Cut(e, "=")
		fmt.Fprintf(&b, "export %s=%s\n", name, quote(value))
	}
	fmt.Fprintf(&b, "export PATH=%s:\"$PATH\"\n", quote(n.paths.in("bin")))
	return b.String()
}

// quote makes a single word of s in any POSIX shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// foreign are prefixes of variables that would lead a daemon away from the
// node's own configuration. The registry takes every REGISTRY_* for a setting.
var foreign = []string{"REGISTRY", "CONTAINERS_", "STORAGE_", "XDG_", "NOTIFY_", "LISTEN_", "DOCKER_"}

// DaemonEnv is the environment of the node's programs.
func (n *Node) DaemonEnv() []string {
	var env []string
outer:
	for _, e := range os.Environ() {
		for _, prefix := range foreign {
			if strings.HasPrefix(e, prefix) {
				continue outer
			}
		}
		env = append(env, e)
	}
	p := n.paths
	env = append(env,
		"PATH="+n.Path(), "HOME="+p.home(), "XDG_RUNTIME_DIR="+p.in("run", "xdg"), "TMPDIR="+p.tmp(),
		"CONTAINERS_STORAGE_CONF="+p.storageConf(), nodeEnv(p))
	if n.state.TLS {
		env = append(env, "SSL_CERT_FILE="+p.cert())
	}
	return env
}
