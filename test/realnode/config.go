package realnode

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"text/template"
	"time"

	"golang.org/x/crypto/bcrypt"

	"github.com/ocihold/ocihold/test/token"
)

// Handlers are the runtime handlers of every node; all of them are runc.
var Handlers = []string{"runc", "vm", "wasm"}

// Guest is the handler of a node booted with Options.Guest: it runs runc as if it
// were a virtual machine's runtime. GVisor is that of one booted with
// Options.GVisor: gVisor's runsc. Command test/guest says how.
const (
	Guest  = "guest"
	GVisor = "gvisor"
)

var crioConf = template.Must(template.New("crio.conf").Parse(`
[crio]
root = "{{.Root}}"
runroot = "{{.RunRoot}}"
storage_driver = "overlay"
log_dir = "{{.Dir}}/log/pods"
version_file = "{{.Dir}}/lib/version"
version_file_persist = "{{.Dir}}/lib/version-persist"
clean_shutdown_file = "{{.Dir}}/lib/clean.shutdown"
internal_repair = false

[crio.api]
listen = "{{.Dir}}/run/crio.sock"
stream_port = "0"

[crio.runtime]
cgroup_manager = "cgroupfs"
conmon_cgroup = "pod"
default_runtime = "runc"
pinns_path = "{{.Dir}}/bin/pinns"
namespaces_dir = "{{.Dir}}/run/ns"
container_exits_dir = "{{.Dir}}/run/exits"
container_attach_socket_dir = "{{.Dir}}/run/attach"
hooks_dir = ["{{.Dir}}/hooks"]
decryption_keys_path = "{{.Dir}}/etc/keys"
apparmor_profile = "unconfined"
selinux = false
irqbalance_config_restore_file = "disable"
log_level = "info"
{{range $name, $path := .Runtimes}}
[crio.runtime.runtimes.{{$name}}]
runtime_path = "{{$path}}"
runtime_type = "oci"
runtime_root = "{{$.Dir}}/run/{{$name}}"
monitor_path = "{{$.Conmon}}"
monitor_cgroup = "pod"
monitor_env = ["{{$.NodeEnv}}"]
{{end}}
[crio.image]
pause_image = "{{.Pause}}"
signature_policy = "{{.Policy}}"
namespaced_auth_dir = "{{.Dir}}/etc/auth"
signature_policy_dir = "{{.Dir}}/etc/policies"
big_files_temporary_dir = "{{.Dir}}/tmp"
{{- if .Insecure}}
insecure_registries = ["{{.Registry}}"]
{{- end}}
{{- if .AuthFile}}
global_auth_file = "{{.AuthFile}}"
{{- end}}

[crio.network]
network_dir = "{{.Dir}}/etc/cni"
plugin_dirs = ["{{.CNI}}"]

[crio.nri]
enable_nri = true
nri_listen = "{{.Dir}}/run/nri.sock"
nri_plugin_dir = "{{.Dir}}/etc/nri/plugins"
nri_plugin_config_dir = "{{.Dir}}/etc/nri/conf.d"
`))

var ociholdConf = template.Must(template.New("ocihold.toml").Parse(`run_dir = "{{.RunDir}}"
state_dir = "{{.StateDir}}"

[crio]
config = "{{.CRIOConf}}"
config_dir = "{{.CRIODropIns}}"
drop_in = "{{.DropIn}}"

[hook]
guard = "{{.Guard}}"
dir = "{{.Hooks}}"
{{if .HandlerRoots}}
[handlers.vm]
root = "{{.VM}}"
allow_annotation = true

[handlers.wasm]
root = "{{.Wasm}}"
platform = "wasi/wasm"
{{end}}`))

const loopbackCNI = `{"cniVersion": "0.4.0", "name": "loopback", "plugins": [{"type": "loopback"}]}`

// writeConfig writes every file that CRI-O, the registry and ocihold read,
// except the drop-in and the hook, which ocihold renders itself.
func (n *Node) writeConfig(o Options) error {
	runc, err := findRunc()
	if err != nil {
		return err
	}
	conmon, err := exec.LookPath("conmon")
	if err != nil {
		return fmt.Errorf("find conmon (Debian package conmon): %w", err)
	}
	cni, err := findCNI()
	if err != nil {
		return err
	}
	p := n.paths
	runtimes := map[string]string{}
	for _, h := range Handlers {
		runtimes[h] = runc
	}
	if o.Guest {
		runtimes[Guest] = p.bin(Guest)
	}
	if o.GVisor {
		runtimes[GVisor] = p.bin(GVisor)
	}
	var crio, ocihold strings.Builder
	data := map[string]any{
		"Dir": p.dir, "Root": p.crioRoot(), "RunRoot": p.crioRunRoot(), "Runtimes": runtimes,
		"Conmon": conmon, "NodeEnv": nodeEnv(p), "Pause": n.pauseImage(), "Policy": p.signaturePolicy(),
		"Insecure": !n.state.TLS, "Registry": n.Registry(), "AuthFile": "", "CNI": cni,
	}
	if n.state.Auth != "" {
		data["AuthFile"] = p.authFile()
	}
	if err := crioConf.Execute(&crio, data); err != nil {
		return err
	}
	err = ociholdConf.Execute(&ocihold, map[string]any{
		"RunDir": p.ociholdRunDir(), "StateDir": p.in("lib", "ocihold"), "CRIOConf": p.crioConf(), "CRIODropIns": p.crioDropIns(),
		"DropIn": p.ociholdDropIn(), "Guard": p.bin("ocihold-guard"), "Hooks": p.hooks(),
		"HandlerRoots": o.HandlerRoots, "VM": p.handlerRoot("vm"), "Wasm": p.handlerRoot("wasm"),
	})
	if err != nil {
		return err
	}
	registriesConf := "unqualified-search-registries = []\nshort-name-mode = \"disabled\"\n"
	if !n.state.TLS {
		registriesConf += fmt.Sprintf("[[registry]]\nlocation = %q\ninsecure = true\n", n.Registry())
	}
	files := map[string]string{
		// crictl's own time-out of 2 s would hide what CRI-O does.
		p.crictlConf():   "timeout: 120\npull-image-on-create: false\n",
		p.crioConf():     crio.String(),
		p.ociholdConf():  ocihold.String(),
		p.registryConf(): n.registryYAML(),
		p.in("etc", "cni", "99-loopback.conflist"): loopbackCNI,
		p.signaturePolicy():                        `{"default": [{"type": "insecureAcceptAnything"}]}`,
		p.registriesConf():                         registriesConf,
		p.storageConf(): fmt.Sprintf("[storage]\ndriver = \"overlay\"\ngraphroot = %q\nrunroot = %q\n",
			p.crioRoot(), p.crioRunRoot()),
	}
	for i, f := range o.CRIOConf {
		content, err := os.ReadFile(f)
		if err != nil {
			return fmt.Errorf("read CRI-O drop-in: %w", err)
		}
		files[filepath.Join(p.crioDropIns(), fmt.Sprintf("5%d-%s", i, filepath.Base(f)))] = string(content)
	}
	if o.OciholdConf != "" {
		content, err := os.ReadFile(o.OciholdConf)
		if err != nil {
			return fmt.Errorf("read ocihold's configuration: %w", err)
		}
		files[filepath.Join(p.ociholdDropIns(), "50-node.toml")] = string(content)
	}
	if n.state.Auth != "" {
		htpasswd, auth, err := credentials(n.Registry(), n.state.Auth)
		if err != nil {
			return err
		}
		files[p.htpasswd()], files[p.authFile()], files[p.users()] = htpasswd, auth, n.state.Auth+"\n"
	}
	for _, f := range slices.Sorted(maps.Keys(files)) {
		if err := os.WriteFile(f, []byte(files[f]), 0o644); err != nil {
			return err
		}
	}
	if n.state.TLS || n.state.Tokens {
		return writeCertificate(p.cert(), p.key())
	}
	return nil
}

func findRunc() (string, error) {
	runc, err := exec.LookPath("runc")
	if err != nil {
		return "", fmt.Errorf("find the runtime (Debian package runc): %w", err)
	}
	return runc, nil
}

func findCNI() (string, error) {
	dirs := []string{"/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"}
	for _, d := range dirs {
		if _, err := os.Stat(filepath.Join(d, "loopback")); err == nil {
			return d, nil
		}
	}
	return "", fmt.Errorf("find the CNI plugin loopback in %s (Debian package containernetworking-plugins)", strings.Join(dirs, ", "))
}

func (n *Node) registryYAML() string {
	y := fmt.Sprintf(`version: 0.1
log: {level: info}
storage:
  filesystem: {rootdirectory: %q}
  delete: {enabled: true}
http:
  net: unix
  addr: %q
  relativeurls: true
`, n.paths.registryData(), n.paths.registrySocket())
	switch {
	case n.state.Tokens:
		scheme := "http"
		if n.state.TLS {
			scheme = "https"
		}
		y += fmt.Sprintf("auth:\n  token: {realm: %q, service: %q, issuer: %q, rootcertbundle: %q}\n",
			scheme+"://"+n.Registry()+"/token", token.Service, token.IssuerName, n.paths.cert())
	case n.state.Auth != "":
		y += fmt.Sprintf("auth:\n  htpasswd: {realm: node, path: %q}\n", n.paths.htpasswd())
	}
	return y
}

func credentials(registry, auth string) (htpasswd, authFile string, err error) {
	user, password, ok := strings.Cut(auth, ":")
	if !ok || user == "" || password == "" {
		return "", "", fmt.Errorf("registry credentials %q are not user:password", auth)
	}
	hash, err := bcrypt.GenerateFromPassword([]byte(password), bcrypt.MinCost)
	if err != nil {
		return "", "", err
	}
	entry := map[string]any{"auth": base64.StdEncoding.EncodeToString([]byte(auth))}
	file, err := json.Marshal(map[string]any{"auths": map[string]any{registry: entry}})
	return user + ":" + string(hash) + "\n", string(file), err
}

// writeCertificate makes a certificate for the proxy and the token service that
// is its own authority.
func writeCertificate(certFile, keyFile string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	now := time.Now()
	cert := &x509.Certificate{
		SerialNumber:          big.NewInt(now.UnixNano()),
		Subject:               pkix.Name{CommonName: "test registry"},
		NotBefore:             now.Add(-time.Hour),
		NotAfter:              now.Add(365 * 24 * time.Hour),
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
		IsCA:                  true,
		IPAddresses:           []net.IP{net.IPv4(127, 0, 0, 1)},
		DNSNames:              []string{"localhost"},
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, key.Public(), key)
	if err != nil {
		return err
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	if err := os.WriteFile(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644); err != nil {
		return err
	}
	return os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER}), 0o600)
}
