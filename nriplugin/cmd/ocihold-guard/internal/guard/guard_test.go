package guard

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/imagevolume/request"
)

const (
	mountsDir = "/run/ocihold/mounts"
	serverKey = request.Domain + "/container.server"
	models    = "image volume /models of container server of pod shop/web-0: requested by annotation " + serverKey + " but "
	tools     = "image volume /opt/tools of container server of pod shop/web-0: requested by annotation " + serverKey + " but "
)

// config is a config.json as CRI-O writes it; what the guard does not read is
// left out.
type config struct {
	Root        specs.Root        `json:"root"`
	Mounts      []specs.Mount     `json:"mounts"`
	Annotations map[string]string `json:"annotations"`
}

func (c *config) mount(destination string) *specs.Mount {
	i := slices.IndexFunc(c.Mounts, func(m specs.Mount) bool { return m.Destination == destination })
	return &c.Mounts[i]
}

func (c *config) add(destination, source string) {
	c.Mounts = append(c.Mounts, specs.Mount{Destination: destination, Type: "bind", Source: source, Options: []string{"bind", "ro"}})
}

func (c *config) remove(destination string) {
	c.Mounts = slices.DeleteFunc(c.Mounts, func(m specs.Mount) bool { return m.Destination == destination })
}

func recorded(t *testing.T) *config {
	t.Helper()
	text, err := os.ReadFile("testdata/config.json")
	require.NoError(t, err)
	c := &config{}
	require.NoError(t, json.Unmarshal(text, c))
	return c
}

// hook runs the guard for a bundle with the config, and a process, if any.
func hook(t *testing.T, dir string, c *config, pid int) error {
	t.Helper()
	bundle := t.TempDir()
	text, err := json.Marshal(c)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(bundle, "config.json"), text, 0o600))
	state, err := json.Marshal(specs.State{ID: "4f6d", Pid: pid, Bundle: bundle})
	require.NoError(t, err)
	return Run([]string{"--mounts", dir}, strings.NewReader(string(state)))
}

func without(options []string, option string) []string {
	return slices.DeleteFunc(options, func(o string) bool { return o == option })
}

// writable makes the volume at /opt/tools a writable one, with these options of
// its mount first.
func writable(options ...string) func(*config) {
	return func(c *config) {
		c.Annotations[serverKey] = strings.Replace(c.Annotations[serverKey], "mountPath: /opt/tools", "readOnly: false\n  mountPath: /opt/tools", 1)
		m := c.mount("/opt/tools")
		m.Options = append(options, without(m.Options, "ro")...)
	}
}

func TestBundle(t *testing.T) {
	for _, tc := range []struct {
		name string
		edit func(*config)
		want string // "" means that the container may start
	}{
		{"all injected", func(*config) {}, ""},
		{"no annotation", func(c *config) { delete(c.Annotations, serverKey); c.remove("/models") }, ""},
		{"annotation of another container", func(c *config) {
			c.Annotations[request.Domain+"/container.db"] = c.Annotations[serverKey]
			delete(c.Annotations, serverKey)
			c.remove("/models")
		}, ""},
		{"empty list", func(c *config) { c.Annotations[serverKey] = "[]"; c.remove("/models") }, ""},
		{"sandbox", func(c *config) { c.Annotations[containerType] = "sandbox"; c.remove("/models") }, ""},
		{"mount below", func(c *config) { c.add("/models/cache", "/c") }, ""},
		{"mount beside", func(c *config) { c.add("/models2", "/c") }, ""},
		{"mount over it, but earlier", func(c *config) {
			c.Mounts = append([]specs.Mount{{Destination: "/", Type: "bind", Source: "/c"}}, c.Mounts...)
		}, ""},
		{"replaced by ours", func(c *config) { c.Mounts = slices.Insert(c.Mounts, 0, specs.Mount{Destination: "/models"}) }, ""},
		{"uncleaned destination", func(c *config) { c.mount("/models").Destination = "//models/." }, ""},
		{"noexec where exec is allowed", func(c *config) {
			m := c.mount("/opt/tools")
			m.Options = append(m.Options, "noexec")
		}, ""},
		{"exec where exec is allowed", func(c *config) {
			m := c.mount("/opt/tools")
			m.Options = append(m.Options, "exec")
		}, ""},
		{"no labels of kubelet", func(c *config) {
			for key := range c.Annotations {
				if strings.HasPrefix(key, "io.kubernetes.pod.") || key == "io.kubernetes.container.name" {
					delete(c.Annotations, key)
				}
			}
			c.remove("/models")
		}, models + errNotInjected.Error()},
		{"writable", writable("rw"), ""},
		{"writable and read-only", writable("ro"), tools + "injected without rw: " + restart},
		{"writable and undone", writable("rw", "rro"), tools + "injected with rro: " + restart},

		{"nothing injected", func(c *config) { c.remove("/models"); c.remove("/opt/tools") }, models + errNotInjected.Error()},
		{"forged report", func(c *config) {
			c.Annotations["ocihold.dev/volumes"] = `[{"mountPath":"/models","key":"abc123"},{"mountPath":"/opt/tools","key":"def456"}]`
			c.remove("/models")
		}, models + errNotInjected.Error()},
		{"one not injected", func(c *config) { c.remove("/opt/tools") }, tools + errNotInjected.Error()},
		{"injected below", func(c *config) { c.mount("/models").Destination = "/models/a" }, models + errNotInjected.Error()},
		{"injected above", func(c *config) { c.mount("/models").Destination = "/" }, models + errNotInjected.Error()},
		{"a volume of the pod", func(c *config) { c.mount("/models").Source = "/var/lib/kubelet/pods/5f1c/volumes/m" }, models + errNotInjected.Error()},
		{"the mount directory itself", func(c *config) { c.mount("/models").Source = mountsDir }, models + errNotInjected.Error()},
		{"deeper than the mount directory", func(c *config) { c.mount("/models").Source = mountsDir + "/abc123/etc" }, models + errNotInjected.Error()},
		{"beside the mount directory", func(c *config) { c.mount("/models").Source = mountsDir + "2/abc123" }, models + errNotInjected.Error()},
		{"out of the mount directory", func(c *config) { c.mount("/models").Source = mountsDir + "/../mounts/.." }, models + errNotInjected.Error()},
		{"not clean", func(c *config) { c.mount("/models").Source = mountsDir + "/x/../abc123" }, models + errNotInjected.Error()},
		{"covered at the path", func(c *config) { c.add("/models", "/c") }, models + `covered by the mount of "/c" at "/models": choose another mountPath`},
		{"covered above the path", func(c *config) { c.add("/opt/", "/c") }, tools + `covered by the mount of "/c" at "/opt": choose another mountPath`},
		{"covered at the root", func(c *config) { c.add("/", "/c") }, models + `covered by the mount of "/c" at "/": choose another mountPath`},
		{"not a bind mount", func(c *config) { c.mount("/models").Type = "overlay" }, models + `injected with type "overlay", not bind: ` + restart},
		{"no ro", func(c *config) { c.mount("/models").Options = without(c.mount("/models").Options, "ro") }, models + "injected without ro: " + restart},
		{"no nosuid", func(c *config) { c.mount("/models").Options = without(c.mount("/models").Options, "nosuid") }, models + "injected without nosuid: " + restart},
		{"no nodev", func(c *config) { c.mount("/opt/tools").Options = without(c.mount("/opt/tools").Options, "nodev") }, tools + "injected without nodev: " + restart},
		{"no noexec", func(c *config) { c.mount("/models").Options = without(c.mount("/models").Options, "noexec") }, models + "injected without noexec: " + restart},
		{"rw", func(c *config) { c.mount("/models").Options = append(c.mount("/models").Options, "rw") }, models + "injected with rw: " + restart},
		{"rsuid", func(c *config) { c.mount("/opt/tools").Options = append(c.mount("/opt/tools").Options, "rsuid") }, tools + "injected with rsuid: " + restart},
		{"dev", func(c *config) { c.mount("/opt/tools").Options = append(c.mount("/opt/tools").Options, "dev") }, tools + "injected with dev: " + restart},
		{"exec", func(c *config) { c.mount("/models").Options = append(c.mount("/models").Options, "exec") }, models + "injected with exec: " + restart},

		{
			"faulty annotation", func(c *config) { c.Annotations[serverKey] = "models" },
			"image volumes of container server of pod shop/web-0: annotation " + serverKey + `: is the string "models", not a list of volumes; write "- image: ...", or [] for no volume`,
		},
		{
			"misspelt key", func(c *config) { c.Annotations[request.Domain+"/pods"] = "[]" },
			"image volumes of container server of pod shop/web-0: annotation " + request.Domain + "/pods: unknown key; did you mean " + request.Domain + "/pod?",
		},
		{"annotation of the container", func(c *config) {
			c.Annotations[serverKey] = "[]"
			c.Annotations[containerAnnotations] = `{"` + serverKey + `":"[]"}`
		}, `container server of pod shop/web-0: "` + serverKey + `" is among the annotations or labels of the container, where it does not count: annotate the pod`},
		{"label of the container", func(c *config) {
			c.Annotations[serverKey] = "[]"
			c.Annotations[containerLabels] = `{"` + request.Domain + `":"[]"}`
		}, `container server of pod shop/web-0: "` + request.Domain + `" is among the annotations or labels of the container, where it does not count: annotate the pod`},
		{
			"unreadable labels", func(c *config) { c.Annotations[containerLabels] = `{` },
			"container server of pod shop/web-0: parse annotation io.kubernetes.cri-o.Labels: unexpected end of JSON input",
		},
		{"no container name", func(c *config) {
			delete(c.Annotations, "io.kubernetes.container.name")
			delete(c.Annotations, "io.kubernetes.cri-o.Metadata")
		}, "container of pod shop/web-0 has image volume annotations but no name: give it metadata.name"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := recorded(t)
			tc.edit(c)
			err := hook(t, mountsDir, c, 0)
			if tc.want == "" {
				require.NoError(t, err)
				return
			}
			require.EqualError(t, err, tc.want)
		})
	}
}

func TestPodName(t *testing.T) {
	require.Equal(t, "shop/web-0", (&bundle{Annotations: map[string]string{sandboxName: "k8s_web-0_shop_uid_0"}}).pod().String())
	require.Equal(t, "/web", (&bundle{Annotations: map[string]string{sandboxName: "web"}}).pod().String())
}

func TestInput(t *testing.T) {
	const usage = "usage: ocihold-guard --mounts DIR, with the OCI state on stdin"
	bundle, broken := t.TempDir(), t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(broken, "config.json"), []byte(`{"mounts": 7}`), 0o600))
	args := []string{"--mounts", mountsDir}
	for _, tc := range []struct {
		name  string
		args  []string
		stdin string
		want  string
	}{
		{"no arguments", nil, "{}", usage},
		{"relative directory", []string{"--mounts", "mounts"}, "{}", usage},
		{"root directory", []string{"--mounts", "//"}, "{}", usage},
		{"unknown flag", []string{"--mount", "/a"}, "{}", "flag provided but not defined: -mount; " + usage},
		{"argument", append(args, "x"), "{}", usage},
		{"no state", args, "", "read the OCI state: unexpected end of JSON input"},
		{"state of another type", args, "[]", "read the OCI state: json: cannot unmarshal array into Go value of type specs.State"},
		{"endless state", args, strings.Repeat(" ", maxState+1), "read the OCI state: it has more than 16777216 bytes"},
		{"no bundle", args, `{"id":"4f6d"}`, `read the bundle of container 4f6d: "" is not an absolute path`},
		{"no config", args, `{"id":"4f6d","bundle":"` + bundle + `"}`, "read the bundle of container 4f6d: open " + bundle + "/config.json: no such file or directory"},
		{"broken config", args, `{"id":"4f6d","bundle":"` + broken + `"}`, "read the bundle of container 4f6d: parse config.json: json: cannot unmarshal number into Go struct field bundle.mounts of type []specs.Mount"},
		{"odd bundle", args, `{"id":"a\nb","bundle":"c"}`, `"read the bundle of container a\nb: \"c\" is not an absolute path"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			require.EqualError(t, Run(tc.args, strings.NewReader(tc.stdin)), tc.want)
		})
	}
	require.EqualError(t, Run(args, iotest.ErrReader(errors.New("closed"))), "read the OCI state: closed")
}
