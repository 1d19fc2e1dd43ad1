package realnode

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
)

// longestSocket is the longest path of a unix socket below the directory.
const longestSocket = "/run/ocihold/ocihold-control.sock"

// maxSocketPath is what fits into sockaddr_un with its final NUL.
const maxSocketPath = 107

// paths names the places in a node's directory.
type paths struct{ dir string }

func newPaths(dir string) (paths, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return paths{}, err
	}
	if err := os.MkdirAll(abs, 0o755); err != nil {
		return paths{}, err
	}
	// The kernel shows resolved paths only.
	abs, err = filepath.EvalSymlinks(abs)
	if err != nil {
		return paths{}, err
	}
	if limit := maxSocketPath - len(longestSocket); len(abs) > limit {
		return paths{}, fmt.Errorf("node directory %s is %d bytes long: unix sockets in it allow at most %d, choose a shorter one", abs, len(abs), limit)
	}
	return paths{abs}, nil
}

func (p paths) in(elem ...string) string { return filepath.Join(append([]string{p.dir}, elem...)...) }

func (p paths) bin(name string) string { return p.in("bin", name) }
func (p paths) log(name string) string { return p.in("log", name+".log") }
func (p paths) pid(name string) string { return p.in("run", name+".pid") }

func (p paths) state() string           { return p.in("node.json") }
func (p paths) env() string             { return p.in("env") }
func (p paths) home() string            { return p.in("home") }
func (p paths) containersConf() string  { return p.in("home", ".config", "containers") }
func (p paths) crictlConf() string      { return p.in("etc", "crictl.yaml") }
func (p paths) hooks() string           { return p.in("hooks") }
func (p paths) tmp() string             { return p.in("tmp") }
func (p paths) crioConf() string        { return p.in("etc", "crio", "crio.conf") }
func (p paths) crioDropIns() string     { return p.in("etc", "crio", "crio.conf.d") }
func (p paths) ociholdDropIn() string   { return filepath.Join(p.crioDropIns(), "90-ocihold.conf") }
func (p paths) ociholdConf() string     { return p.in("etc", "ocihold", "ocihold.toml") }
func (p paths) ociholdDropIns() string  { return p.ociholdConf() + ".d" }
func (p paths) ociholdRunDir() string   { return p.in("run", "ocihold") }
func (p paths) imageSocket() string     { return filepath.Join(p.ociholdRunDir(), "image.sock") }
func (p paths) crioRoot() string        { return p.in("lib", "root") }
func (p paths) crioRunRoot() string     { return p.in("run", "runroot") }
func (p paths) crioSocket() string      { return p.in("run", "crio.sock") }
func (p paths) registryConf() string    { return p.in("etc", "registry.yml") }
func (p paths) registryData() string    { return p.in("lib", "registry") }
func (p paths) registrySocket() string  { return p.in("run", "registry.sock") }
func (p paths) proxySocket() string     { return p.in("run", "proxy.sock") }
func (p paths) htpasswd() string        { return p.in("etc", "htpasswd") }
func (p paths) users() string           { return p.in("etc", "users") }
func (p paths) authFile() string        { return p.in("etc", "auth.json") }
func (p paths) cert() string            { return p.in("etc", "tls.crt") }
func (p paths) key() string             { return p.in("etc", "tls.key") }
func (p paths) storageConf() string     { return filepath.Join(p.containersConf(), "storage.conf") }
func (p paths) registriesConf() string  { return filepath.Join(p.containersConf(), "registries.conf") }
func (p paths) signaturePolicy() string { return filepath.Join(p.containersConf(), "policy.json") }

// handlerRoot is the root of a handler that has one of its own.
func (p paths) handlerRoot(handler string) string { return p.in("lib", "handlers", handler) }

// cgroupParent is the cgroup below which all pods of the node are made.
func (p paths) cgroupParent() string {
	sum := sha256.Sum256([]byte(p.dir))
	return "/ocihold-" + hex.EncodeToString(sum[:4])
}

// dirs are the directories that must be there before anything starts.
func (p paths) dirs() []string {
	return []string{
		p.in("bin"), p.in("log"), p.in("log", "pods"), p.in("run"), p.in("run", "xdg"), p.tmp(), p.hooks(),
		p.containersConf(),
		filepath.Join(p.containersConf(), "registries.conf.d"),
		p.crioDropIns(), p.ociholdDropIns(), p.ociholdRunDir(), p.crioRoot(), p.registryData(),
		p.in("etc", "cni"), p.in("etc", "nri", "plugins"), p.in("etc", "nri", "conf.d"),
		p.in("etc", "keys"), p.in("etc", "policies"), p.in("etc", "auth"),
	}
}
