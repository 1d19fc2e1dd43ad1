package cli

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"go.yaml.in/yaml/v3"
)

const defaultKubeletConfig = "/var/lib/kubelet/config.yaml"

// kubeletSettings are kubelet's, as far as they say where it asks for images.
type kubeletSettings struct {
	source   string // what named the endpoint, or could have
	endpoint string
	runtime  string // the endpoint for pods and containers, if named
}

// checkKubelet looks whether kubelet asks Ocihold for images.
func (c *checker) checkKubelet() {
	const check = "kubelet"
	settings, err := readKubelet("/proc", c.kubelet, c.inForce.Listen)
	if errors.Is(err, fs.ErrNotExist) {
		c.add(check, checkWarning, "no kubelet runs here, and there is no "+c.kubelet, "name its file by --kubelet-config")
		return
	}
	if err != nil {
		c.check(check, err, "")
		return
	}
	ours := "unix://" + c.config.ImageSocket()
	if samePath(socketOf(settings.endpoint), c.config.ImageSocket()) {
		c.add(check, checkOK, "it asks ocihold for images", "")
		return
	}
	fix := fmt.Sprintf("set imageServiceEndpoint: %s in %s, then systemctl restart kubelet", ours, settings.source)
	if strings.HasPrefix(settings.source, "-") {
		fix = fmt.Sprintf("start it with %s=%s", settings.source, ours)
	}
	detail := fmt.Sprintf("it asks %s for images, by %s", settings.endpoint, settings.source)
	if settings.endpoint == "" {
		detail = fmt.Sprintf("it asks CRI-O for images: %s has no imageServiceEndpoint", settings.source)
	}
	switch {
	case len(c.config.Roots()) > 0:
		c.add(check, checkFailed, detail, fix)
	case c.config.Volumes.Pin && (settings.endpoint == "" || samePath(socketOf(settings.endpoint), c.inForce.Listen)):
		c.add(check, checkOK, detail+", which has what is in use pinned", "")
	default:
		c.add(check, checkWarning, detail+"; without handlers that will do", fix)
	}
}

// readKubelet finds out where the kubelet of the CRI-O with that socket asks for
// images: by the command line of one that runs, as seen below proc, else by its
// configuration file and the drop-ins of that.
func readKubelet(proc, file, crio string) (kubeletSettings, error) {
	running, err := kubelets(proc)
	if err != nil {
		return kubeletSettings{}, err
	}
	for _, args := range running {
		settings, err := settingsOf(args, file)
		if err != nil || settings.runtime == "" || samePath(socketOf(settings.runtime), crio) {
			return settings, err
		}
	}
	return settingsOf(nil, file)
}

// settingsOf reads the settings of a kubelet that was started with args.
func settingsOf(args []string, file string) (kubeletSettings, error) {
	const images, runtime = "image-service-endpoint", "container-runtime-endpoint"
	var settings kubeletSettings
	named, isNamed := flagValue(args, "config")
	if isNamed {
		file = named
	}
	imagesFlag, hasImages := flagValue(args, images)
	runtimeFlag, hasRuntime := flagValue(args, runtime)
	if isNamed || !hasImages {
		var err error
		if settings, err = settings.override(file); err != nil {
			return kubeletSettings{}, err
		}
	}
	if dir, ok := flagValue(args, "config-dir"); ok {
		err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || filepath.Ext(path) != ".conf" {
				return err
			}
			settings, err = settings.override(path)
			return err
		})
		if err != nil {
			return kubeletSettings{}, err
		}
	}
	if hasImages {
		settings.source, settings.endpoint = "--"+images, imagesFlag
	}
	if hasRuntime {
		settings.runtime = runtimeFlag
	}
	return settings, nil
}

// override reads one of kubelet's files.
func (s kubeletSettings) override(file string) (kubeletSettings, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return s, fmt.Errorf("read kubelet's configuration: %w", err)
	}
	var content struct {
		ImageServiceEndpoint     string `yaml:"imageServiceEndpoint"`
		ContainerRuntimeEndpoint string `yaml:"containerRuntimeEndpoint"`
	}
	if err := yaml.Unmarshal(text, &content); err != nil {
		return s, fmt.Errorf("read kubelet's configuration %s: %w", file, err)
	}
	if content.ImageServiceEndpoint != "" || s.source == "" {
		s.source, s.endpoint = file, content.ImageServiceEndpoint
	}
	s.runtime = cmp.Or(content.ContainerRuntimeEndpoint, s.runtime)
	return s, nil
}

// kubelets returns the arguments of each kubelet that runs.
func kubelets(proc string) ([][]string, error) {
	files, err := filepath.Glob(filepath.Join(proc, "[0-9]*", "cmdline"))
	if err != nil {
		return nil, err
	}
	var running [][]string
	for _, file := range files {
		line, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		var args []string
		for arg := range bytes.SplitSeq(bytes.TrimSuffix(line, []byte{0}), []byte{0}) {
			args = append(args, string(arg))
		}
		for i, arg := range args[:min(2, len(args))] { // as a program of its own, or of hyperkube
			if filepath.Base(arg) == "kubelet" {
				running = append(running, args[i+1:])
				break
			}
		}
	}
	return running, nil
}

// flagValue returns the last value that a command line gives to a flag.
func flagValue(args []string, name string) (value string, ok bool) {
	for i, arg := range args {
		isFlag := strings.HasPrefix(arg, "-")
		arg = strings.TrimLeft(arg, "-")
		switch {
		case !isFlag:
		case strings.HasPrefix(arg, name+"="):
			value, ok = arg[len(name)+1:], true
		case arg == name && i+1 < len(args):
			value, ok = args[i+1], true
		}
	}
	return value, ok
}

// socketOf returns the path of an endpoint, which may be without a scheme.
func socketOf(endpoint string) string { return strings.TrimPrefix(endpoint, "unix://") }

// samePath tells whether two paths lead to one place, by links such as
// /var/run.
func samePath(a, b string) bool { return a != "" && resolved(a) == resolved(b) }

func resolved(path string) string {
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err != nil {
		return filepath.Clean(path)
	}
	return filepath.Join(dir, filepath.Base(path))
}
