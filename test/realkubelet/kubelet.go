package realkubelet

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/realnode"
)

// nodeName is what kubelet calls its node; static pods have it in their names.
const nodeName = "node"

const (
	// startLimit bounds the wait for kubelet to be up.
	startLimit = 2 * time.Minute
	// podLimit bounds the wait for a pod, which kubelet may try several times.
	podLimit = 2 * time.Minute
	// stopLimit is how long kubelet may take to end.
	stopLimit = 30 * time.Second
)

// Options are what tests want differently.
type Options struct {
	// Gates are feature gates.
	Gates map[string]bool
	// GCHigh and GCLow are the marks of the image garbage collection in percent;
	// without them there is none. Images may be collected however new they are.
	GCHigh, GCLow int
	// CRIOImages has kubelet ask CRI-O for images, and not ocihold. Restart does
	// not change it.
	CRIOImages bool
}

// Kubelet is a running kubelet.
type Kubelet struct {
	Recorder

	node *realnode.Node
	dir  string
	stop func() // ends the program
	past int64  // bytes of the log that are of earlier runs
}

// Start starts kubelet on a node, until the test ends. It returns when kubelet
// has listed the images, as it does once it is up.
func Start(t *testing.T, n *realnode.Node, o Options) *Kubelet {
	t.Helper()
	k := &Kubelet{node: n, dir: filepath.Join(n.Dir(), "kubelet")}
	require.NoError(t, os.MkdirAll(k.manifests(), 0o755))
	crio := filepath.Join(n.Dir(), "run", "crio.sock")
	images := n.ImageSocket()
	if o.CRIOImages {
		images = crio
	}
	k.serve(t, k.socket("runtime"), crio)
	k.serve(t, k.socket("images"), images)
	k.write(t, "kubeconfig", kubeconfig(serveAPI(t, nodeName, realnode.Handlers)))
	k.start(t, o)
	t.Cleanup(func() {
		k.stop()
		if t.Failed() {
			t.Log("the end of kubelet's log:\n" + tail(n.LogFile("kubelet"), 60))
		}
	})
	return k
}

// Restart stops kubelet and starts it with other options. Its pods run on.
func (k *Kubelet) Restart(t *testing.T, o Options) {
	t.Helper()
	k.stop()
	k.start(t, o)
}

func (k *Kubelet) start(t *testing.T, o Options) {
	t.Helper()
	program, err := realnode.KubeletBinary(t.Context())
	require.NoError(t, err)
	k.write(t, "config.yaml", k.config(o))
	calls := len(k.Calls())

	// kubelet has some directories below /var whatever it is told. Without the
	// huge pages it asks for no limit of theirs, which a cgroup may lack.
	const script = `
for dir in /var/lib /var/log /sys/kernel/mm/hugepages; do
	test ! -d $dir || mount -t tmpfs kubelet $dir
done
exec "$@"`
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), "unshare", "--mount", "sh", "-ec", script, "kubelet", program,
		"--config", filepath.Join(k.dir, "config.yaml"), "--kubeconfig", filepath.Join(k.dir, "kubeconfig"),
		"--kube-api-content-type", "application/json", "--root-dir", k.dir, "--cert-dir", filepath.Join(k.dir, "pki"),
		"--hostname-override", nodeName, "--v", "2")
	log, err := os.OpenFile(k.node.LogFile("kubelet"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	require.NoError(t, err)
	defer func() { _ = log.Close() }()
	k.past, err = log.Seek(0, io.SeekEnd)
	require.NoError(t, err)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), "OCIHOLD_NODE_DIR="+k.node.Dir()) // the node's end would end it, too
	require.NoError(t, cmd.Start())
	k.stop = sync.OnceFunc(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		kill := time.AfterFunc(stopLimit, func() { _ = cmd.Process.Kill() })
		defer kill.Stop()
		_ = cmd.Wait() // it ends by the signal
	})
	require.Eventually(t, func() bool {
		return slices.ContainsFunc(k.Calls()[calls:], func(c Call) bool { return c.Method == "ImageService/ListImages" })
	}, startLimit, 50*time.Millisecond, "kubelet does not list images")
}

// HasLogged tells whether kubelet has logged a text since it was started.
func (k *Kubelet) HasLogged(t *testing.T, text string) bool {
	t.Helper()
	log, err := os.ReadFile(k.node.LogFile("kubelet"))
	require.NoError(t, err)
	return strings.Contains(string(log[k.past:]), text)
}

func (k *Kubelet) socket(name string) string {
	return filepath.Join(k.node.Dir(), "run", "kubelet-"+name+".sock")
}

func (k *Kubelet) manifests() string { return filepath.Join(k.dir, "manifests") }

func (k *Kubelet) config(o Options) object {
	high := 100 // no collection
	if o.GCHigh != 0 {
		high = o.GCHigh
	}
	return object{
		"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
		"containerRuntimeEndpoint":    "unix://" + k.socket("runtime"),
		"imageServiceEndpoint":        "unix://" + k.socket("images"),
		"featureGates":                o.Gates,
		"staticPodPath":               k.manifests(),
		"fileCheckFrequency":          "1s",
		"podLogsDir":                  filepath.Join(k.node.Dir(), "log", "pods"),
		"volumePluginDir":             filepath.Join(k.dir, "volume-plugins"),
		"enableServer":                false,
		"authentication":              object{"anonymous": object{"enabled": true}, "webhook": object{"enabled": false}},
		"authorization":               object{"mode": "AlwaysAllow"},
		"cgroupDriver":                "cgroupfs",
		"cgroupsPerQOS":               false,
		"enforceNodeAllocatable":      []string{},
		"failSwapOn":                  false,
		"failCgroupV1":                false,
		"makeIPTablesUtilChains":      false,
		"oomScoreAdj":                 0,
		"resolvConf":                  "",
		"evictionHard":                object{},
		"imageMinimumGCAge":           "-1s",
		"imageGCHighThresholdPercent": high,
		"imageGCLowThresholdPercent":  o.GCLow,
	}
}

func kubeconfig(server string) object {
	return object{
		"apiVersion": "v1", "kind": "Config", "current-context": "test",
		"clusters": []object{{"name": "test", "cluster": object{"server": server}}},
		"users":    []object{{"name": "test", "user": object{}}},
		"contexts": []object{{"name": "test", "context": object{"cluster": "test", "user": "test"}}},
	}
}

func (k *Kubelet) write(t *testing.T, name string, o object) {
	t.Helper()
	content, err := json.MarshalIndent(o, "", "  ")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(k.dir, name), content, 0o644))
}

// Pod is a pod with one container, named main.
type Pod struct {
	Name         string
	Annotations  map[string]string
	RuntimeClass string
	Image        string
	// PullPolicy is Always, IfNotPresent or Never.
	PullPolicy string
	NonRoot    bool
	// Volume is an image to mount at /volume, if any.
	Volume string
}

// Run gives kubelet a pod to run.
func (k *Kubelet) Run(t *testing.T, p Pod) {
	t.Helper()
	container := object{
		"name": "main", "image": p.Image, "imagePullPolicy": p.PullPolicy, "command": []string{"/bin/sleep", "1000000"},
	}
	if p.NonRoot {
		container["securityContext"] = object{"runAsNonRoot": true}
	}
	spec := object{
		"hostNetwork": true, "automountServiceAccountToken": false, "enableServiceLinks": false,
		"terminationGracePeriodSeconds": 1, "containers": []object{container},
	}
	if p.RuntimeClass != "" {
		spec["runtimeClassName"] = p.RuntimeClass
	}
	if p.Volume != "" {
		spec["volumes"] = []object{{"name": "volume", "image": object{"reference": p.Volume, "pullPolicy": "IfNotPresent"}}}
		container["volumeMounts"] = []object{{"name": "volume", "mountPath": "/volume"}}
	}
	content, err := json.Marshal(object{
		"apiVersion": "v1", "kind": "Pod", "spec": spec,
		"metadata": object{"name": p.Name, "namespace": "default", "annotations": p.Annotations},
	})
	require.NoError(t, err)
	// kubelet must not see half a file.
	draft := filepath.Join(k.dir, p.Name)
	require.NoError(t, os.WriteFile(draft, content, 0o644))
	require.NoError(t, os.Rename(draft, k.manifest(p.Name)))
}

func (k *Kubelet) manifest(pod string) string { return filepath.Join(k.manifests(), pod+".json") }

// Remove takes a pod away from kubelet.
func (k *Kubelet) Remove(t *testing.T, pod string) {
	t.Helper()
	require.NoError(t, os.Remove(k.manifest(pod)))
}

// Containers lists CRI-O's containers of a pod.
func (k *Kubelet) Containers(ctx context.Context, pod string) ([]*cri.Container, error) {
	list, err := k.node.Runtime().ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{
		LabelSelector: map[string]string{"io.kubernetes.pod.name": pod + "-" + nodeName},
	}})
	return list.GetContainers(), err
}

// AwaitContainer waits until kubelet has started a pod's container, for the
// second time and so on as attempt says, and returns its id.
func (k *Kubelet) AwaitContainer(t *testing.T, pod string, attempt uint32) string {
	t.Helper()
	var id string
	require.Eventually(t, func() bool {
		containers, err := k.Containers(t.Context(), pod)
		i := slices.IndexFunc(containers, func(c *cri.Container) bool {
			return c.GetMetadata().GetAttempt() == attempt && c.GetState() == cri.ContainerState_CONTAINER_RUNNING
		})
		if err != nil || i < 0 {
			return false
		}
		id = containers[i].GetId()
		// It runs before kubelet has the answer.
		return slices.ContainsFunc(k.Calls(), func(c Call) bool {
			return c.Method == "RuntimeService/StartContainer" && c.Request.(object)["containerId"] == id
		})
	}, podLimit, 50*time.Millisecond, "pod %s does not run", pod)
	return id
}

// tail returns the last lines of a file.
func tail(file string, lines int) string {
	content, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(content), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
